// Sums of arrays (formats.h).
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

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

template <class V>
KERNEL_INLINE void store_sum(Pair<V> sum, float* to) {
  store<Order::consecutive>(sum, to);
}
template <class V, class Half>
KERNEL_INLINE void store_sum(Pair<V> sum, Half* to) {
  store_copy<Order::consecutive>(sum, to, false);
}

// `x` rounded to an element's format.
template <class V>
KERNEL_INLINE Pair<V> rounded(Pair<V> x, const float*) {
  return x;
}
template <class V>
KERNEL_INLINE Pair<V> rounded(Pair<V> x, const BFloat16*) {
  using Bits = typename V::Bits;
  const Bits upper = Bits::broadcast(0xFFFF0000U);
  const Pair<Bits> bits = rounded_bits(x);
  return {V::from_bits(bits.first & upper), V::from_bits(bits.second & upper)};
}
template <class V>
KERNEL_INLINE Pair<V> rounded(Pair<V> x, const Float16*) {
  return {round_to_float16(x.first), round_to_float16(x.second)};
}

// Elements times a factor, rounded to their format.
template <class V, class Element>
KERNEL_INLINE Pair<V> load_scaled(const Element* from, V factor) {
  const Pair<V> x = load<V, Order::consecutive>(from);
  return rounded(Pair<V>{x.first * factor, x.second * factor}, from);
}

// Sums the pairs of vectors that `pair_of` gives for each of `number` parts.
template <class V, class PairOf>
KERNEL_INLINE Pair<V> sum_parts(std::size_t number, const PairOf& pair_of) {
  Pair<V> sum = pair_of(0);
  for (std::size_t p = 1; p < number; ++p) {
    const Pair<V> more = pair_of(p);
    sum = {sum.first + more.first, sum.second + more.second};
  }
  return sum;
}

// Writes a pair of sums of elements to `total`, or adds it.
template <class Element, bool kAdd, class V, class Total>
KERNEL_INLINE void keep_sum(Pair<V> sum, Total* total) {
  if constexpr (!std::is_same_v<Element, Total>) sum = rounded(sum, static_cast<const Element*>(nullptr));
  if constexpr (kAdd) {
    const Pair<V> before = load<V, Order::consecutive>(total);
    sum = {before.first + sum.first, before.second + sum.second};
  }
  store_sum(sum, total);
}

template <class V, class Element, class Total, bool kAdd>
void sum_elements(const SumArrays& a) {
  constexpr std::size_t block = 2 * V::width;
  const auto part = [&](std::size_t p) { return static_cast<const Element*>(a.parts[p]); };
  auto* const total = static_cast<Total*>(a.total);
  const V factor = V::broadcast(a.factor);
  const std::size_t end = a.start + a.count;
  std::size_t i = a.start;
  for (; i + block <= end; i += block) {
    keep_sum<Element, kAdd>(
        sum_parts<V>(a.number, [&](std::size_t p) { return load_scaled(part(p) + i, factor); }), total + i);
  }
  const std::size_t rest = end - i;
  if (rest == 0) return;
  Element padded[block] = {};
  Total kept[block] = {};
  if constexpr (kAdd) std::memcpy(kept, total + i, rest * sizeof(Total));
  keep_sum<Element, kAdd>(sum_parts<V>(a.number,
                                       [&](std::size_t p) {
                                         std::memcpy(padded, part(p) + i, rest * sizeof(Element));
                                         return load_scaled(padded, factor);
                                       }),
                          kept);
  std::memcpy(total + i, kept, rest * sizeof(Total));
}

template <class V, class Element>
void sum_to_total(const SumArrays& a) {
  if (a.add) return sum_elements<V, Element, float, true>(a);
  if (a.total_dtype == a.dtype) return sum_elements<V, Element, Element, false>(a);
  return sum_elements<V, Element, float, false>(a);
}

template <class V>
void sum(const SumArrays& a) {
  switch (a.dtype) {
    case DType::float32:
      return sum_to_total<V, float>(a);
    case DType::bfloat16:
      return sum_to_total<V, BFloat16>(a);
    case DType::float16:
      return sum_to_total<V, Float16>(a);
    case DType::int8:
      break;  // not supported: the arguments have no scales
  }
}

}  // namespace
}  // namespace lightning_zero
