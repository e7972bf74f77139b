// Sums of an fp32 array and another one (formats.h).
#pragma once

#include <cstddef>
#include <cstring>

#include "kernels/formats.h"
#include "lightning_zero/add.h"

namespace lightning_zero {
namespace {

// Adds a pair of vectors.
template <class V, class Element>
KERNEL_INLINE void add_block(float* total, const Element* values) {
  const Pair<V> sum = load<V, Order::consecutive>(total);
  const Pair<V> more = load<V, Order::consecutive>(values);
  store<Order::consecutive>(Pair<V>{sum.first + more.first, sum.second + more.second}, total);
}

template <class V, class Element>
void add_elements(float* total, const Element* values, std::size_t count) {
  constexpr std::size_t block = 2 * V::width;
  std::size_t i = 0;
  for (; i + block <= count; i += block) add_block<V>(total + i, values + i);
  const std::size_t rest = count - i;
  if (rest == 0) return;
  float padded[block] = {};
  Element more[block] = {};
  std::memcpy(padded, total + i, rest * sizeof(float));
  std::memcpy(more, values + i, rest * sizeof(Element));
  add_block<V>(padded, more);
  std::memcpy(total + i, padded, rest * sizeof(float));
}

template <class V>
void add(const AddArrays& a) {
  switch (a.dtype) {
    case DType::float32:
      return add_elements<V>(a.total, static_cast<const float*>(a.values), a.count);
    case DType::bfloat16:
      return add_elements<V>(a.total, static_cast<const BFloat16*>(a.values), a.count);
    case DType::float16:
      return add_elements<V>(a.total, static_cast<const Float16*>(a.values), a.count);
    case DType::int8:
      break;  // not supported: the arguments have no scales
  }
}

}  // namespace
}  // namespace lightning_zero
