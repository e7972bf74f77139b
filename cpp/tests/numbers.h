// A second implementation of the number formats, by arithmetic in double instead of bits, and numbers for
// tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "buffer.h"
#include "lightning_zero/dispatch.h"

namespace lightning_zero {

inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

struct Format {
  int precision;     // significant bits
  int min_exponent;  // the smallest exponent of normal numbers
  int max_exponent;
};

constexpr Format format_of(DType dtype) {
  if (dtype == DType::float32) return {24, -126, 127};
  return dtype == DType::bfloat16 ? Format{8, -126, 127} : Format{11, -14, 15};
}

// The value of a number in memory.
inline double decode(DType dtype, std::uint32_t bits) {
  const Format format = format_of(dtype);
  const int width = dtype == DType::float32 ? 32 : 16;
  const int fraction_bits = format.precision - 1;
  const std::uint32_t fraction = bits & ((1U << fraction_bits) - 1);
  const int biased = static_cast<int>((bits >> fraction_bits) & ((1U << (width - format.precision)) - 1));
  const double sign = (bits >> (width - 1)) != 0 ? -1.0 : 1.0;
  if (biased > format.max_exponent - format.min_exponent + 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const double significand = fraction + (biased > 0 ? std::ldexp(1.0, fraction_bits) : 0.0);
  return sign * std::ldexp(significand, format.min_exponent - fraction_bits + (biased > 0 ? biased - 1 : 0));
}

// The distance between neighbours around x.
inline double unit_of(DType dtype, double x) {
  const Format format = format_of(dtype);
  const int exponent = x == 0.0 ? format.min_exponent : std::max(std::ilogb(x), format.min_exponent);
  return std::ldexp(1.0, exponent - format.precision + 1);
}

// The nearest number of the format, as a double.
inline double nearest(DType dtype, double x, Ties ties = Ties::even) {
  if (!std::isfinite(x)) return x;
  const double unit = unit_of(dtype, x);
  const double rounded = (ties == Ties::even ? std::nearbyint(x / unit) : std::round(x / unit)) * unit;
  const bool overflow = std::abs(rounded) >= std::ldexp(1.0, format_of(dtype).max_exponent + 1);
  return overflow ? std::copysign(std::numeric_limits<double>::infinity(), x) : rounded;
}

inline bool same_value(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

// Whether two numbers in memory are the same; the payload of a NaN is not specified.
inline bool same_bits(DType dtype, std::uint32_t a, std::uint32_t b) {
  return a == b || (std::isnan(decode(dtype, a)) && std::isnan(decode(dtype, b)));
}

inline ::testing::AssertionResult same_numbers(DType dtype, const Buffer& a, const Buffer& b) {
  if (std::memcmp(a.data(), b.data(), a.bytes()) == 0) return ::testing::AssertionSuccess();
  if (dtype == DType::int8) return ::testing::AssertionFailure() << "codes differ";
  for (std::size_t i = 0; i < a.count(); ++i) {
    if (!same_bits(dtype, a.bits(i), b.bits(i))) {
      return ::testing::AssertionFailure()
             << "element " << i << " of " << a.count() << ": " << std::hex << a.bits(i) << " and "
             << b.bits(i) << " (" << decode(dtype, a.bits(i)) << " and " << decode(dtype, b.bits(i)) << ")";
    }
  }
  return ::testing::AssertionSuccess();
}

// The bits of sample numbers of the format: most of them are moderate, the rest of all kinds.
inline const std::vector<std::uint32_t>& samples(DType dtype) {
  const auto make = [](DType format) {
    const std::uint32_t sign = format == DType::float32 ? 0x80000000U : 0x8000U;
    std::uint32_t infinity = 0x7F800000U;
    if (format != DType::float32) infinity = format == DType::bfloat16 ? 0x7F80U : 0x7C00U;
    const std::uint32_t smallest_normal = infinity & ~(infinity << 1);
    const std::uint32_t special[] = {0,
                                     1,
                                     2,
                                     smallest_normal - 1,
                                     smallest_normal,
                                     infinity - 1,
                                     infinity,
                                     infinity + 1 /*NaN*/,
                                     sign / 2 - 1 /*NaN*/,
                                     infinity | (sign >> 1),
                                     infinity / 2};
    std::mt19937 random(1);
    std::vector<std::uint32_t> bits;
    const int width = format == DType::float32 ? 32 : 16;
    for (int i = 0; i < 4099; ++i) {
      const std::uint32_t any = static_cast<std::uint32_t>(random()) >> (32 - width);
      switch (random() % 8) {
        case 0:
          bits.push_back(special[random() % std::size(special)] | (any & sign));
          break;
        case 1:
          bits.push_back(any);
          break;
        default: {
          // Exponents near that of 1, with any fraction.
          const std::uint32_t exponent =
              infinity / 2 - static_cast<std::uint32_t>(random() % 8) * smallest_normal;
          bits.push_back((any & ~infinity) | (exponent & infinity));
        }
      }
    }
    return bits;
  };
  static const std::vector<std::uint32_t> all[] = {make(DType::float32), make(DType::bfloat16),
                                                   make(DType::float16)};
  return all[static_cast<int>(dtype)];
}

// Fills the array with samples that depend on the seed; 8-bit arrays with all codes.
inline void fill_with_samples(Buffer& to, DType dtype, std::size_t seed, std::uint32_t mask = 0xFFFFFFFFU) {
  if (dtype == DType::int8) {
    for (std::size_t i = 0; i < to.count(); ++i) to.set_bits(i, static_cast<std::uint32_t>(i * 37 + seed));
    return;
  }
  const std::vector<std::uint32_t>& from = samples(dtype);
  const std::size_t period = std::min(to.count(), from.size());
  for (std::size_t i = 0; i < period; ++i) to.set_bits(i, from[(seed * 7919 + i) % from.size()] & mask);
  // The rest by large copies, since sanitizers make element-wise code slow.
  for (std::size_t done = period * item_size(dtype); done < to.bytes();) {
    const std::size_t bytes = std::min(done, to.bytes() - done);
    std::memcpy(to.data() + done, to.data(), bytes);
    done += bytes;
  }
}

inline std::vector<const Target*> supported_targets() {
  std::vector<const Target*> result;
  for (const Target& target : compiled_targets()) {
    if (target.supported()) result.push_back(&target);
  }
  return result;
}

inline std::string name_of(DType dtype) {
  if (dtype == DType::int8) return "int8";
  return dtype == DType::float32 ? "float32" : dtype == DType::bfloat16 ? "bfloat16" : "float16";
}

inline std::string target_name(const ::testing::TestParamInfo<const Target*>& info) {
  return info.param->name;
}

}  // namespace lightning_zero
