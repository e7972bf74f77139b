// Conversions between whole and split masters (formats.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/formats.h"
#include "lightning_zero/split.h"

namespace lightning_zero {
namespace {

// Calls `convert(whole, high, remainder)` for each pair of vectors; for the remainder in a padded copy.
template <class V, class Master, class Convert>
void for_each_block(const SplitArrays& a, Convert convert) {
  using High = typename Master::First;
  constexpr std::size_t block = 2 * V::width;
  auto* const high = static_cast<High*>(a.high);
  std::size_t i = 0;
  for (; i + block <= a.count; i += block) convert(a.whole + i, high + i, a.remainder + i);
  const std::size_t rest = a.count - i;
  if (rest == 0) return;
  float x[block] = {};
  High h[block] = {};
  std::int16_t r[block] = {};
  std::memcpy(x, a.whole + i, rest * sizeof(float));
  std::memcpy(h, high + i, rest * sizeof(High));
  std::memcpy(r, a.remainder + i, rest * sizeof(std::int16_t));
  convert(x, h, r);
  std::memcpy(a.whole + i, x, rest * sizeof(float));
  std::memcpy(high + i, h, rest * sizeof(High));
  std::memcpy(a.remainder + i, r, rest * sizeof(std::int16_t));
}

template <class V, class Master>
void split_as(const SplitArrays& a) {
  for_each_block<V, Master>(a, [](float* whole, typename Master::First* high, std::int16_t* remainder) {
    const Pair<V> x = load<V, Order::consecutive>(whole);
    Master::template store<Order::consecutive>(x, high, remainder, false);
  });
}

template <class V, class Master>
void join_as(const SplitArrays& a) {
  for_each_block<V, Master>(a, [](float* whole, typename Master::First* high, std::int16_t* remainder) {
    const Pair<V> x = Master::template load<V, Order::consecutive>(high, remainder);
    store<Order::consecutive>(x, whole);
  });
}

template <class V>
void split(const SplitArrays& a) {
  a.dtype == DType::float16 ? split_as<V, SplitFloat16>(a) : split_as<V, SplitBFloat16>(a);
}

template <class V>
void join(const SplitArrays& a) {
  a.dtype == DType::float16 ? join_as<V, SplitFloat16>(a) : join_as<V, SplitBFloat16>(a);
}

}  // namespace
}  // namespace lightning_zero
