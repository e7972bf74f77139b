// Sum of squares of an array in host memory.
#pragma once

#include <cstddef>

#include "lightning_zero/update.h"

namespace lightning_zero {

// The order of the additions has few dependencies, so that a device can use it too. Elements form rows of
// kLanes lanes. kRows rows are added lane by lane, in order; then kRows of these sums, and so on up to a
// piece, whose lanes are added in order. The sums of pieces are added like rows.
constexpr std::size_t kLanes = 16;
constexpr std::size_t kRows = 16;

// The sum over one piece of `count` elements, by one target. Products are exact in double; each addition
// rounds.
using SumOfSquaresFunction = double (*)(const void* values, DType dtype, std::size_t count);

// The sum over all elements, on up to `threads` threads. Pieces have a fixed length and are added in a fixed
// order, so that the result depends on the values only. It is finite if and only if every element is, since
// the squares of fp32 numbers are far from the limits of double.
double sum_of_squares_parallel(SumOfSquaresFunction sum, const void* values, DType dtype, std::size_t count,
                               std::size_t threads);

}  // namespace lightning_zero
