// The sum of squares in double over sixteen lanes, the same for every target, in the order of reduce.h.
#pragma once

#include <cstddef>
#include <cstring>

#include "kernels/formats.h"
#include "lightning_zero/reduce.h"

namespace lightning_zero {
namespace {

// Adds up to kRows rows of kLanes elements to the lanes of `sums`, in order.
template <class Squares, class Element>
void add_rows(Squares& sums, const Element* values, std::size_t count) {
  using V = typename Squares::Float;
  constexpr std::size_t block = 2 * V::width > kLanes ? 2 * V::width : kLanes;
  static_assert(kRows * kLanes % block == 0, "whole blocks");
  Squares rows;
  const auto add = [&rows](const Element* from) {
    for (std::size_t k = 0; k < block; k += 2 * V::width) {
      const Pair<V> x = load<V, Order::consecutive>(from + k);
      rows.add(x.first, k);
      rows.add(x.second, k + V::width);
    }
  };
  std::size_t i = 0;
  for (; i + block <= count; i += block) add(values + i);
  if (i < count) {
    Element rest[block] = {};
    std::memcpy(rest, values + i, (count - i) * sizeof(Element));
    add(rest);
  }
  sums.add(rows);
}

template <class Squares, class Element>
double sum_of_squares_of(const Element* values, std::size_t count) {
  constexpr std::size_t small = kRows * kLanes, large = kRows * small;
  Squares total;
  for (std::size_t i = 0; i < count; i += large) {
    const std::size_t stop = count - i < large ? count : i + large;
    Squares sums;
    for (std::size_t k = i; k < stop; k += small) {
      add_rows(sums, values + k, stop - k < small ? stop - k : small);
    }
    total.add(sums);
  }
  double lanes[kLanes];
  total.store(lanes);
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class Squares>
double sum_of_squares(const void* values, DType dtype, std::size_t count) {
  switch (dtype) {
    case DType::float32:
      return sum_of_squares_of<Squares>(static_cast<const float*>(values), count);
    case DType::bfloat16:
      return sum_of_squares_of<Squares>(static_cast<const BFloat16*>(values), count);
    case DType::float16:
      return sum_of_squares_of<Squares>(static_cast<const Float16*>(values), count);
    case DType::int8:
      break;  // not supported: the arguments have no scales
  }
  return 0.0;
}

}  // namespace
}  // namespace lightning_zero
