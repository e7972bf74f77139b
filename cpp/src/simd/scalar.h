// One fp32 lane in portable C++: the definition that the wide vector types match bit for bit.
//
// Everything here has internal linkage: a function compiled with a target's flags must never be the
// linker's choice for a caller that was not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/types.h"

namespace lightning_zero {
namespace {

inline std::uint32_t to_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// a * b + c, rounded once. Without the instruction: the product is exact in double, and rounding the sum
// to odd makes the final rounding to fp32 correct (Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums: proved algorithms using rounding to odd", 2008).
inline float fused_multiply_add(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  const double x = static_cast<double>(a) * static_cast<double>(b);
  const double y = static_cast<double>(c);
  const double sum = x + y;
  const double back = sum - x;
  const double error = (x - (sum - back)) + (y - back);  // TwoSum; NaN when the sum is not finite
  std::int64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  if ((error < 0.0 || error > 0.0) && (bits & 1) == 0) {
    // Away from zero if the error has the sign of the sum, else towards it.
    bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
  }
  double odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return static_cast<float>(odd);
#endif
}

inline float bfloat16_to_float(std::uint16_t half) {
  return from_bits(static_cast<std::uint32_t>(half) << 16);
}

// Round to nearest even; every NaN becomes the positive quiet one.
inline std::uint16_t float_to_bfloat16(float x) {
  const std::uint32_t bits = to_bits(x);
  if (x != x) return 0x7FC0;
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

inline float float16_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinity, or NaN made quiet
    const std::uint32_t quiet = magnitude > 0x7C00U ? 0x00400000U : 0U;
    return from_bits(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13) | quiet);
  }
  if (magnitude < 0x0400U) {  // zero or subnormal: a multiple of 2^-24
    return from_bits(sign | to_bits(static_cast<float>(magnitude) * 0x1p-24F));
  }
  return from_bits(sign | ((magnitude << 13) + ((127U - 15U) << 23)));
}

// Round to nearest even; overflow becomes infinity, a NaN keeps its sign and leading payload and is quiet.
inline std::uint16_t float_to_float16(float x) {
  const std::uint32_t bits = to_bits(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x477FF000U) {  // 65520, halfway between the largest number and 2^16
    half = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // 2^-14, the smallest normal number
    half = (magnitude - ((127U - 15U) << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  } else if (magnitude >= 0x33000000U) {  // 2^-25, half of the smallest subnormal number
    const std::uint32_t shift = 126U - (magnitude >> 23);
    const std::uint32_t significand = (magnitude & 0x007FFFFFU) | 0x00800000U;
    const std::uint32_t quotient = significand >> shift;
    const std::uint32_t rest = significand & ((1U << shift) - 1U);
    const std::uint32_t middle = 1U << (shift - 1U);
    half = quotient + ((rest > middle || (rest == middle && (quotient & 1U) != 0)) ? 1U : 0U);
  } else {
    half = 0U;
  }
  return static_cast<std::uint16_t>(sign | half);
}

struct ScalarFloat {
  static constexpr std::size_t width = 1;
  float value;

  static ScalarFloat broadcast(float x) { return {x}; }
  static ScalarFloat load(const float* from) { return {*from}; }
  static ScalarFloat load(const BFloat16* from) { return {bfloat16_to_float(from->bits)}; }
  static ScalarFloat load(const Float16* from) { return {float16_to_float(from->bits)}; }

  void store(float* to) const { *to = value; }
  void store(BFloat16* to) const { to->bits = float_to_bfloat16(value); }
  void store(Float16* to) const { to->bits = float_to_float16(value); }

  friend ScalarFloat operator+(ScalarFloat a, ScalarFloat b) { return {a.value + b.value}; }
  friend ScalarFloat operator-(ScalarFloat a, ScalarFloat b) { return {a.value - b.value}; }
  friend ScalarFloat operator*(ScalarFloat a, ScalarFloat b) { return {a.value * b.value}; }
  friend ScalarFloat operator/(ScalarFloat a, ScalarFloat b) { return {a.value / b.value}; }
  friend ScalarFloat sqrt(ScalarFloat a) { return {__builtin_sqrtf(a.value)}; }
  friend ScalarFloat fma(ScalarFloat a, ScalarFloat b, ScalarFloat c) {
    return {fused_multiply_add(a.value, b.value, c.value)};
  }
};

}  // namespace
}  // namespace lightning_zero
