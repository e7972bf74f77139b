// Sums of arrays.
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

// `sum[i] = factor * parts[0][i] + factor * parts[1][i] + ...`, in this order, for `start <= i < start +
// count`. Products are rounded to the dtype of the parts; sums are computed in fp32, each rounded, and
// converted to this dtype once. Then `total[i] = sum[i]`, or `total[i] += sum[i]`, rounded once.
struct SumArrays {
  void* total;        // it may be one of the parts, if these are not added to it
  DType total_dtype;  // that of the parts or, always if they are added to it, float32
  bool add;
  const void* const* parts;  // at least one
  std::size_t number;        // of parts
  float factor;
  DType dtype;  // of the parts: float32, bfloat16 or float16
  std::size_t start;
  std::size_t count;
};

// Sums, by one target.
using SumFunction = void (*)(const SumArrays&);

// Runs `sum` on up to `threads` threads (at least 1).
void sum_parallel(SumFunction sum, const SumArrays& arrays, std::size_t threads);

}  // namespace lightning_zero
