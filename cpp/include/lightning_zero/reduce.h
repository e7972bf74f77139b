// Sum of squares of an array in host memory.
#pragma once

#include <cstddef>

#include "lightning_zero/update.h"

namespace lightning_zero {

// Elements i with equal i % kLanes are summed up together, in order, before the lanes are.
constexpr std::size_t kLanes = 16;

// The sum over one piece of `count` elements by one target: products are exact in double, each addition
// rounds.
using SumOfSquaresFunction = double (*)(const void* values, DType dtype, std::size_t count);

// The sum over all elements, on up to `threads` threads: pieces of a fixed length, added in order, so that
// the result depends on the values alone. It is finite if and only if every element is: the squares of fp32
// numbers are far from the limits of double.
double sum_of_squares_parallel(SumOfSquaresFunction sum, const void* values, DType dtype, std::size_t count,
                               std::size_t threads);

}  // namespace lightning_zero
