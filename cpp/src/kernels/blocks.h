// 8-bit state in blocks (see lightning_zero/blocks.h): the formats, and one pass of an update over memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/formats.h"
#include "kernels/rules.h"
#include "lightning_zero/blocks.h"
#include "lightning_zero/update.h"

namespace lightning_zero {
namespace {

template <class V>
KERNEL_INLINE V magnitude(V x) {
  return V::from_bits(x.bits() & V::Bits::broadcast(0x7FFFFFFF));
}

// The format of a number divided by its block's scale, which is below 2: `kExponentBits` bits of exponent and
// 4 bits of significand.
template <int kExponentBits, bool kSigned>
struct SmallFloat {
  static constexpr bool is_signed = kSigned;
  static constexpr std::uint32_t top = (1U << kExponentBits) - 1;       // the exponent of numbers from 1 to 2
  static constexpr int dropped = 19;                                    // bits of an fp32 significand
  static constexpr std::uint32_t smallest_normal = (128U - top) << 23;  // as fp32 bits

  // Decodes by fp16: with their bits at the right position, codes are fp16 numbers, including gradual
  // underflow.
  template <class V>
  KERNEL_INLINE static Pair<V> decode(const std::uint8_t* from, V scale) {
    Pair<V> x;
    V::load_halves(from, kSigned, x.first, x.second);
    if (kSigned) {  // not multiplied into the scale, which may become infinite
      const V bias = V::broadcast(static_cast<float>(1U << (15 - top)));
      x = {x.first * bias, x.second * bias};
    }
    return {x.first * scale, x.second * scale};
  }

  // Encodes numbers, which must not be negative if the format is unsigned, to codes in the lower 8 bits of
  // both halves of lanes. A number is rounded up if the sum of its dropped bits and of 16 bits of `random`,
  // aligned at the upper end, overflows. kToNearest as `random` rounds to nearest, with ties away from zero.
  template <class V>
  KERNEL_INLINE static typename V::Bits encode(Pair<V> x, V inverse_scale, typename V::Bits random) {
    using Bits = typename V::Bits;
    const Bits bits = Bits::broadcast(0xFFFFU << (dropped - 16));
    const Bits base_of_codes = Bits::broadcast(0U - smallest_normal);
    const Bits even =
        scaled(x.first, inverse_scale) + masked_or(random << (dropped - 16), bits, base_of_codes);
    const Bits odd =
        scaled(x.second, inverse_scale) + masked_or(random >> (32 - dropped), bits, base_of_codes);
    if constexpr (kSigned) {
      const Bits sign = join_halves(x.first.bits() >> 24, x.second.bits() >> 8);
      return masked_or(sign, Bits::broadcast(0x00800080),
                       join_halves(even >> dropped, odd >> (dropped - 16)));
    }
    // Numbers of the unsigned format are divided by, so a number greater than zero must not become zero.
    const Bits one = Bits::broadcast(1);
    return maximum(even >> dropped, minimum(x.first.bits(), one)) |
           (maximum(odd >> dropped, minimum(x.second.bits(), one)) << 16);
  }

 private:
  // A number's bits, of which the upper ones minus those of the smallest normal number are the code.
  template <class V>
  KERNEL_INLINE static typename V::Bits scaled(V x, V inverse_scale) {
    using Bits = typename V::Bits;
    if (kSigned) x = magnitude(x);
    // Of these two, the first is larger below the smallest normal number; its significand is the code. From
    // there on the second is larger; its exponent is one more than that of the number.
    const V subnormal = fma(x, inverse_scale, V::from_bits(Bits::broadcast(smallest_normal)));
    const V normal = x * (inverse_scale + inverse_scale);
    return maximum(subnormal.bits(), normal.bits());
  }
};

using SignedSmallFloat = SmallFloat<3, true>;
using UnsignedSmallFloat = SmallFloat<4, false>;

constexpr std::uint32_t kToNearest = 0x80008000;
// The scale of a block that contains a number that is not finite: all its numbers are NaN.
constexpr std::uint32_t kNotFinite = 255;

// The scale of a block whose largest magnitude has these bits, such that no scaled number is rounded up to 2.
inline std::uint32_t scale_of(std::uint32_t largest) {
  if (largest == 0) return 0;
  const std::uint32_t exponent = (largest + (1U << SignedSmallFloat::dropped) - 1) >> 23;
  return exponent == 0 ? 1 : exponent;
}

// The bits of the factor that decodes: 2^(scale - 127), or 0 for a block of zeros.
inline std::uint32_t bits_of_scale(std::uint32_t scale) {
  return scale == kNotFinite ? 0x7FC00000U : scale << 23;
}

// The bits of the factor that encodes: the inverse of the above, for a block of finite numbers.
inline std::uint32_t bits_of_inverse(std::uint32_t scale) {
  if (scale == 254) return 0x00400000U;
  return (254 - (scale == 0 ? 1 : scale)) << 23;
}

template <class V>
KERNEL_INLINE typename V::Bits larger_magnitude(typename V::Bits largest, Pair<V> x) {
  return maximum(largest, maximum(magnitude(x.first).bits(), magnitude(x.second).bits()));
}

template <class V>
KERNEL_INLINE std::uint32_t largest_lane(typename V::Bits lanes) {
  float values[V::width];
  V::from_bits(lanes).store(values);
  std::uint32_t largest = 0;
  for (std::size_t k = 0; k < V::width; ++k) {
    std::uint32_t bits;
    std::memcpy(&bits, &values[k], sizeof bits);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// ---- between fp32 and blocks ----

template <class V, class Format>
void quantize_block(const float* whole, std::uint8_t* codes, std::uint8_t* scale) {
  using Bits = typename V::Bits;
  Bits largest = Bits::broadcast(0);
  for (std::size_t i = 0; i < kBlockLength; i += 2 * V::width) {
    largest = larger_magnitude(largest, load<V, Order::consecutive>(whole + i));
  }
  const std::uint32_t found = scale_of(largest_lane<V>(largest));
  *scale = static_cast<std::uint8_t>(found < kNotFinite ? found : kNotFinite);
  if (found >= kNotFinite) {
    std::memset(codes, 0, kBlockLength);
    return;
  }
  const V inverse = V::from_bits(Bits::broadcast(bits_of_inverse(found)));
  for (std::size_t i = 0; i < kBlockLength; i += 2 * V::width) {
    Pair<V> x = load<V, Order::interleaved>(whole + i);
    if (!Format::is_signed) x = {magnitude(x.first), magnitude(x.second)};
    Format::encode(x, inverse, Bits::broadcast(kToNearest)).store_raw(codes + i);
  }
}

template <class V, class Format>
void dequantize_block(float* whole, const std::uint8_t* codes, const std::uint8_t* scale) {
  const V factor = V::from_bits(V::Bits::broadcast(bits_of_scale(*scale)));
  for (std::size_t i = 0; i < kBlockLength; i += 2 * V::width) {
    store<Order::interleaved>(Format::decode(codes + i, factor), whole + i);
  }
}

// Calls `whole_block(i, b)` for each whole block b, which begins at element i, and `cut_block(i, b, lead,
// count)` for each incomplete block b, of which `count` elements from its element `lead` on begin at element
// i.
template <class WholeBlock, class CutBlock>
KERNEL_INLINE void for_blocks(std::size_t lead, std::size_t count, WholeBlock whole_block,
                              CutBlock cut_block) {
  std::size_t i = 0, b = 0;
  if (lead > 0 && count > 0) {
    i = kBlockLength - lead < count ? kBlockLength - lead : count;
    cut_block(0, b++, lead, i);
  }
  for (; i + kBlockLength <= count; i += kBlockLength) whole_block(i, b++);
  if (i < count) cut_block(i, b, 0, count - i);
}

template <class V, class Format>
void quantize_as(const BlockArrays& a) {
  for_blocks(
      a.lead, a.count,
      [&](std::size_t i, std::size_t b) {
        quantize_block<V, Format>(a.whole + i, a.codes + i, a.scales + b);
      },
      [&](std::size_t i, std::size_t b, std::size_t lead, std::size_t count) {
        float whole[kBlockLength] = {};
        std::uint8_t codes[kBlockLength];
        std::memcpy(whole + lead, a.whole + i, count * sizeof(float));
        quantize_block<V, Format>(whole, codes, a.scales + b);
        std::memcpy(a.codes + i, codes + lead, count);
      });
}

template <class V, class Format>
void dequantize_as(const BlockArrays& a) {
  for_blocks(
      a.lead, a.count,
      [&](std::size_t i, std::size_t b) {
        dequantize_block<V, Format>(a.whole + i, a.codes + i, a.scales + b);
      },
      [&](std::size_t i, std::size_t b, std::size_t lead, std::size_t count) {
        float whole[kBlockLength];
        std::uint8_t codes[kBlockLength] = {};
        std::memcpy(codes + lead, a.codes + i, count);
        dequantize_block<V, Format>(whole, codes, a.scales + b);
        std::memcpy(a.whole + i, whole + lead, count * sizeof(float));
      });
}

template <class V>
void quantize(const BlockArrays& a) {
  a.is_signed ? quantize_as<V, SignedSmallFloat>(a) : quantize_as<V, UnsignedSmallFloat>(a);
}

template <class V>
void dequantize(const BlockArrays& a) {
  a.is_signed ? dequantize_as<V, SignedSmallFloat>(a) : dequantize_as<V, UnsignedSmallFloat>(a);
}

// ---- the update ----

// The update for a rule whose first state is signed and whose second, if any, is unsigned. Each block is
// decoded and updated; when the largest new numbers are known, it is encoded again. In between, the new state
// stays in the caches. The parameter is updated with the state before the state is rounded.
template <class V, class Rule, class Grad, class Master>
class BlockUpdate {
  using Bits = typename V::Bits;
  using First = typename Master::First;
  using Second = typename Master::Second;
  static constexpr Order kOrder = Order::interleaved;
  static constexpr std::size_t kPair = 2 * V::width;
  static constexpr int kStates = Rule::states;

  struct Pointers {
    const Grad* grad;
    First* first;
    Second* second;  // may be null
    std::uint8_t* codes[kMaxStates];
    std::uint8_t* scales[kMaxStates];
  };

 public:
  BlockUpdate(const typename Rule::Coefficients& coefficients, const RoundingStream& stream)
      : rule_(coefficients), random_(stream), first_index_(stream.first) {}

  void run(const UpdateArrays& a, bool stream) const {
    auto* const second = static_cast<Second*>(Master::streams ? a.copy_out : a.remainder);
    auto* const first = static_cast<First*>(a.param);
    const auto* const grad = static_cast<const Grad*>(a.grad);
    const std::size_t lead = first_index_ % kBlockLength;
    // Blocks consist of whole vectors, so either all of them are aligned or none is.
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(second) - lead * sizeof(Second);
    const bool aligned = address % (kPair * sizeof(Second)) == 0;
    const bool streams = stream && Master::streams && second != nullptr && aligned;
    const auto at = [&](std::size_t i, std::size_t b) {
      Pointers moved = {grad + i, first + i, second == nullptr ? nullptr : second + i, {}, {}};
      for (int k = 0; k < kStates; ++k) {
        moved.codes[k] = static_cast<std::uint8_t*>(a.states[k]) + i;
        moved.scales[k] = a.scales[k] + b;
      }
      return moved;
    };
    for_blocks(
        lead, a.count,
        [&](std::size_t i, std::size_t b) {
          streams ? block<true>(at(i, b), first_index_ + i) : block<false>(at(i, b), first_index_ + i);
        },
        [&](std::size_t i, std::size_t b, std::size_t cut, std::size_t count) {
          partial(at(i, b), first_index_ + i - cut, cut, count);
        });
  }

 private:
  template <bool kStream>
  void block(const Pointers& at, std::size_t index) const {
    alignas(64) float states[kStates][kBlockLength];
    V scales[kStates];
    Bits largest[kStates];
    for (int k = 0; k < kStates; ++k) {
      scales[k] = V::from_bits(Bits::broadcast(bits_of_scale(*at.scales[k])));
      largest[k] = Bits::broadcast(0);
    }
    for (std::size_t i = 0; i < kBlockLength; i += kPair) {
      Second* const beside = at.second == nullptr ? nullptr : at.second + i;
      const Pair<V> p = Master::template load<V, kOrder>(at.first + i, beside);
      const Pair<V> grad = load<V, kOrder>(at.grad + i);
      V first[kMaxStates];
      V second[kMaxStates];
      const Pair<V> m = SignedSmallFloat::decode(at.codes[0] + i, scales[0]);
      first[0] = m.first;
      second[0] = m.second;
      if (kStates > 1) {
        const Pair<V> v = UnsignedSmallFloat::decode(at.codes[kStates - 1] + i, scales[kStates - 1]);
        first[kStates - 1] = v.first;
        second[kStates - 1] = v.second;
      }
      const Pair<V> g = {rule_.advance(p.first, grad.first, first),
                         rule_.advance(p.second, grad.second, second)};
      for (int k = 0; k < kStates; ++k) {
        first[k].store(states[k] + i);
        second[k].store(states[k] + i + V::width);
        largest[k] = larger_magnitude<V>(largest[k], {first[k], second[k]});
      }
      const Pair<V> updated = {rule_.updated(p.first, g.first, first),
                               rule_.updated(p.second, g.second, second)};
      Master::template store<kOrder>(updated, at.first + i, beside, kStream);
    }
    V inverse[kStates];
    bool finite = true;
    for (int k = 0; k < kStates; ++k) {
      const std::uint32_t found = scale_of(largest_lane<V>(largest[k]));
      finite = finite && found < kNotFinite;
      *at.scales[k] = static_cast<std::uint8_t>(found < kNotFinite ? found : kNotFinite);
      inverse[k] = V::from_bits(Bits::broadcast(found < kNotFinite ? bits_of_inverse(found) : 0));
    }
    if (unlikely(!finite)) return poison(at);
    for (std::size_t i = 0; i < kBlockLength; i += kPair) {
      const Pair<Bits> random = random_.at(index + i);
      const Pair<V> m = {V::load(states[0] + i), V::load(states[0] + i + V::width)};
      SignedSmallFloat::encode(m, inverse[0], random.first).store_raw(at.codes[0] + i);
      if (kStates > 1) {
        const float* const from = states[kStates - 1] + i;
        const Pair<V> v = {V::load(from), V::load(from + V::width)};
        UnsignedSmallFloat::encode(v, inverse[kStates - 1], random.second)
            .store_raw(at.codes[kStates - 1] + i);
      }
    }
  }

  // A number that is not finite makes all state of its block NaN.
  [[gnu::noinline]] static void poison(const Pointers& at) {
    for (int k = 0; k < kStates; ++k) {
      *at.scales[k] = static_cast<std::uint8_t>(kNotFinite);
      std::memset(at.codes[k], 0, kBlockLength);
    }
  }

  // Updates a part of a block, which begins with its element `lead`, in a copy padded with zeros. These do
  // not change the scale.
  [[gnu::noinline]] void partial(const Pointers& at, std::size_t index, std::size_t lead,
                                 std::size_t count) const {
    Grad grad[kBlockLength] = {};
    First first[kBlockLength] = {};
    Second second[kBlockLength] = {};
    std::uint8_t codes[kMaxStates][kBlockLength] = {};
    Pointers padded = {grad, first, second, {}, {}};
    std::memcpy(grad + lead, at.grad, count * sizeof(Grad));
    std::memcpy(first + lead, at.first, count * sizeof(First));
    if (at.second != nullptr) std::memcpy(second + lead, at.second, count * sizeof(Second));
    for (int k = 0; k < kStates; ++k) {
      std::memcpy(codes[k] + lead, at.codes[k], count);
      padded.codes[k] = codes[k];
      padded.scales[k] = at.scales[k];
    }
    block<false>(padded, index);
    std::memcpy(at.first, first + lead, count * sizeof(First));
    if (at.second != nullptr) std::memcpy(at.second, second + lead, count * sizeof(Second));
    for (int k = 0; k < kStates; ++k) std::memcpy(at.codes[k], codes[k] + lead, count);
  }

  const Rule rule_;
  const RandomBits<V> random_;
  const std::size_t first_index_;  // index of the first element in the stream
};

}  // namespace
}  // namespace lightning_zero
