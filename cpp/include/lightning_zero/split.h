// Whole and split fp32 masters.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lightning_zero/update.h"

namespace lightning_zero {

// The same `count` numbers in two representations: in fp32, and as the nearest 16-bit numbers and the
// distances to them.
struct SplitArrays {
  float* whole;
  void* high;
  DType dtype;  // of `high`: bfloat16 or float16
  std::int16_t* remainder;
  std::size_t count;
};

// Computes one representation from the other, by one target.
using SplitFunction = void (*)(const SplitArrays&);

// Runs `convert` on up to `threads` threads (at least 1).
void split_parallel(SplitFunction convert, const SplitArrays& arrays, std::size_t threads);

}  // namespace lightning_zero
