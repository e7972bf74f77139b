// Sum of squares of an array in host memory.
#pragma once

#include <cstddef>

#include "lightning_zero/update.h"

namespace lightning_zero {

// The order of the additions, in which few of them depend on each other, so that a device can follow it:
// elements are rows of kLanes lanes; kRows rows are added lane by lane, in order; then as many sums of these,
// and so on up to a piece, whose lanes are added in order; then the sums of pieces, as the rows.
constexpr std::size_t kLanes = 16;
constexpr std::size_t kRows = 16;

// The sum over one piece of `count` elements by one target: products are exact in double, each addition
// rounds.
using SumOfSquaresFunction = double (*)(const void* values, DType dtype, std::size_t count);

// The sum over all elements, on up to `threads` threads: pieces of a fixed length, added in order, so that
// the result depends on the values alone. It is finite if and only if every element is: the squares of fp32
// numbers are far from the limits of double.
double sum_of_squares_parallel(SumOfSquaresFunction sum, const void* values, DType dtype, std::size_t count,
                               std::size_t threads);

}  // namespace lightning_zero
