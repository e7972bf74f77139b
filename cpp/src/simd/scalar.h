// One fp32 lane in portable C++: the reference that the wide vector types match bit for bit.
//
// Everything here has internal linkage, so that the linker cannot choose a function compiled with one
// target's flags for a caller that was compiled without them.
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

// a * b + c, rounded once. Without an FMA instruction the product is computed exactly in double, and the sum
// is rounded to odd, so that the final rounding to fp32 is correct (Boldo and Melquiond, "Emulation of FMA
// and correctly rounded sums: proved algorithms using rounding to odd", 2008).
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

inline float float16_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinity, or NaN, which becomes quiet
    const std::uint32_t quiet = magnitude > 0x7C00U ? 0x00400000U : 0U;
    return from_bits(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13) | quiet);
  }
  if (magnitude < 0x0400U) {  // zero or subnormal: a multiple of 2^-24
    return from_bits(sign | to_bits(static_cast<float>(magnitude) * 0x1p-24F));
  }
  return from_bits(sign | ((magnitude << 13) + ((127U - 15U) << 23)));
}

// Rounds to nearest even; overflow becomes infinity; a NaN becomes quiet and keeps its sign and leading
// payload.
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

// The fp16 number with the bits of a code shifted by 6, and with its sign, if any, in the highest bit.
inline std::uint16_t half_of_code(std::uint32_t code, bool is_signed) {
  const std::uint32_t sign = is_signed ? code & 0x80U : 0U;
  return static_cast<std::uint16_t>((sign << 8) | ((code - sign) << 6));
}

struct ScalarBits {
  std::uint32_t value;

  static ScalarBits broadcast(std::uint32_t x) { return {x}; }
  static ScalarBits iota() { return {0}; }
  static ScalarBits load(const std::uint16_t* from) { return {*from}; }
  static ScalarBits load(const std::int16_t* from) {
    return {static_cast<std::uint32_t>(static_cast<std::int32_t>(*from))};
  }

  // Loads two 16-bit elements, the first into the lower half.
  static ScalarBits load_raw(const std::uint16_t* from) {
    return {from[0] | (static_cast<std::uint32_t>(from[1]) << 16)};
  }

  // Stores two 8-bit elements, from the lower and the upper half.
  void store_raw(std::uint8_t* to) const {
    to[0] = static_cast<std::uint8_t>(value);
    to[1] = static_cast<std::uint8_t>(value >> 16);
  }

  void store_raw(std::uint16_t* to, bool) const {
    to[0] = static_cast<std::uint16_t>(value);
    to[1] = static_cast<std::uint16_t>(value >> 16);
  }
  // Stores the lower halves of both.
  static void store_lower(ScalarBits first, ScalarBits second, std::uint16_t* to, bool) {
    to[0] = static_cast<std::uint16_t>(first.value);
    to[1] = static_cast<std::uint16_t>(second.value);
  }

  friend ScalarBits operator+(ScalarBits a, ScalarBits b) { return {a.value + b.value}; }
  friend ScalarBits operator-(ScalarBits a, ScalarBits b) { return {a.value - b.value}; }
  friend ScalarBits operator*(ScalarBits a, ScalarBits b) { return {a.value * b.value}; }
  friend ScalarBits operator&(ScalarBits a, ScalarBits b) { return {a.value & b.value}; }
  friend ScalarBits operator|(ScalarBits a, ScalarBits b) { return {a.value | b.value}; }
  friend ScalarBits operator^(ScalarBits a, ScalarBits b) { return {a.value ^ b.value}; }
  friend ScalarBits operator<<(ScalarBits a, int n) { return {a.value << n}; }
  friend ScalarBits operator>>(ScalarBits a, int n) { return {a.value >> n}; }
  // The minimum of signed numbers.
  friend ScalarBits minimum(ScalarBits a, ScalarBits b) {
    return static_cast<std::int32_t>(a.value) < static_cast<std::int32_t>(b.value) ? a : b;
  }
  friend ScalarBits maximum(ScalarBits a, ScalarBits b) {
    return static_cast<std::int32_t>(a.value) > static_cast<std::int32_t>(b.value) ? a : b;
  }
  friend ScalarBits shift_right_signed(ScalarBits a, int n) {
    return {static_cast<std::uint32_t>(static_cast<std::int32_t>(a.value) >> n)};
  }
  // (a & mask) | b
  friend ScalarBits masked_or(ScalarBits a, ScalarBits mask, ScalarBits b) { return (a & mask) | b; }
  // The lower half of `low` beside the upper half of `high`.
  friend ScalarBits join_halves(ScalarBits low, ScalarBits high) {
    return {(low.value & 0xFFFFU) | (high.value & 0xFFFF0000U)};
  }
};

struct ScalarFloat {
  using Bits = ScalarBits;
  static constexpr std::size_t width = 1;
  float value;

  static ScalarFloat broadcast(float x) { return {x}; }
  static ScalarFloat from_bits(Bits bits) { return {lightning_zero::from_bits(bits.value)}; }
  static ScalarFloat load(const float* from) { return {*from}; }
  static ScalarFloat load(const Float16* from) { return {float16_to_float(from->bits)}; }

  // Loads the even and the odd one of two 8-bit elements, each as the fp16 number with its bits shifted by 6.
  static void load_halves(const std::uint8_t* from, bool is_signed, ScalarFloat& even, ScalarFloat& odd) {
    even = {float16_to_float(half_of_code(from[0], is_signed))};
    odd = {float16_to_float(half_of_code(from[1], is_signed))};
  }

  Bits bits() const { return {to_bits(value)}; }
  void store(float* to) const { *to = value; }
  static void store_pair(ScalarFloat first, ScalarFloat second, Float16* to, bool) {
    to[0].bits = float_to_float16(first.value);
    to[1].bits = float_to_float16(second.value);
  }

  friend ScalarFloat operator+(ScalarFloat a, ScalarFloat b) { return {a.value + b.value}; }
  friend ScalarFloat operator-(ScalarFloat a, ScalarFloat b) { return {a.value - b.value}; }
  friend ScalarFloat operator*(ScalarFloat a, ScalarFloat b) { return {a.value * b.value}; }
  friend ScalarFloat operator/(ScalarFloat a, ScalarFloat b) { return {a.value / b.value}; }
  friend ScalarFloat sqrt(ScalarFloat a) { return {__builtin_sqrtf(a.value)}; }
  friend ScalarFloat fma(ScalarFloat a, ScalarFloat b, ScalarFloat c) {
    return {fused_multiply_add(a.value, b.value, c.value)};
  }
  friend ScalarFloat round_to_float16(ScalarFloat a) { return {float16_to_float(float_to_float16(a.value))}; }
  // NaN if either is, as in torch.maximum.
  friend ScalarFloat maximum(ScalarFloat a, ScalarFloat b) {
    return a.value > b.value || a.value != a.value ? a : b;
  }
  // 0 for NaN, as in torch.sign.
  friend ScalarFloat sign(ScalarFloat a) {
    return {static_cast<float>(a.value > 0.0F) - static_cast<float>(a.value < 0.0F)};
  }
  friend Bits select_nan(ScalarFloat a, Bits if_nan, Bits otherwise) {
    return a.value != a.value ? if_nan : otherwise;
  }
  friend bool any_nan(ScalarFloat a, ScalarFloat b) { return a.value != a.value || b.value != b.value; }
  // Nothing to do: of two elements the first is the even one.
  friend void deinterleave(ScalarFloat&, ScalarFloat&) {}
  friend void interleave(ScalarFloat&, ScalarFloat&) {}
};

struct ScalarSquares {
  using Float = ScalarFloat;
  double lanes[16] = {};

  void add(ScalarFloat x, std::size_t i) {
    const double wide = static_cast<double>(x.value);
    lanes[i % 16] += wide * wide;
  }
  void add(const ScalarSquares& other) {
    for (int k = 0; k < 16; ++k) lanes[k] += other.lanes[k];
  }
  void store(double* to) const {
    for (int k = 0; k < 16; ++k) to[k] = lanes[k];
  }
};

}  // namespace
}  // namespace lightning_zero
