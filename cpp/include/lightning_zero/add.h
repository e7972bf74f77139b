// Sums of an fp32 array and another one, in place.
#pragma once

#include <cstddef>

#include "lightning_zero/update.h"

namespace lightning_zero {

// `total[i] += values[i]`, rounded once, for `count` elements.
struct AddArrays {
  float* total;
  const void* values;
  DType dtype;  // of `values`: float32, bfloat16 or float16
  std::size_t count;
};

// Adds, by one target.
using AddFunction = void (*)(const AddArrays&);

// Runs `add` on up to `threads` threads (at least 1).
void add_parallel(AddFunction add, const AddArrays& arrays, std::size_t threads);

}  // namespace lightning_zero
