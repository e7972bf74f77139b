// 8-bit state in blocks (see lightning_zero/blocks.h): the formats, and one pass over memory with them.
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

// A number as a multiple of the block's scale, which is below 2: `kExponentBits` and 4 bits of significand.
template <int kExponentBits, bool kSigned>
struct SmallFloat {
  static constexpr std::uint32_t top = (1U << kExponentBits) - 1;      // the exponent of numbers from 1 to 2
  static constexpr int dropped = 19;                                   // bits of an fp32 significand
  static constexpr std::uint32_t base = (127U - top) << 23;            // from its exponent to that of fp32
  static constexpr std::uint32_t smallest_normal = base + (1U << 23);  // as fp32 bits

  // From codes in the lower 8 bits of lanes.
  template <class V>
  KERNEL_INLINE static V decode(typename V::Bits code, V scale) {
    using Bits = typename V::Bits;
    const V smallest = V::from_bits(Bits::broadcast(smallest_normal));
    const Bits magnitude = kSigned ? code & Bits::broadcast(0x7F) : code;
    const V normal = V::from_bits((magnitude << dropped) + Bits::broadcast(base));
    // Below the smallest normal number the significand has no leading one; from there on this is larger.
    const V subnormal = (normal - smallest) + normal;
    const V x = V::from_bits(minimum(normal.bits(), subnormal.bits())) * scale;
    return kSigned ? V::from_bits(x.bits() | ((code & Bits::broadcast(0x80)) << 24)) : x;
  }

  // To codes in the lower 8 bits of lanes. `bias` is added to the bits of the significand that are dropped.
  template <class V>
  KERNEL_INLINE static typename V::Bits encode(V x, V inverse_scale, typename V::Bits bias) {
    using Bits = typename V::Bits;
    const V smallest = V::from_bits(Bits::broadcast(smallest_normal));
    const Bits bits = x.bits() & Bits::broadcast(0x7FFFFFFF);
    const V y = V::from_bits(bits) * inverse_scale;
    const Bits normal = ((y.bits() + bias) >> dropped) - Bits::broadcast(base >> dropped);
    // Of numbers below the smallest normal one this is larger, of others it is not.
    const Bits subnormal =
        (((y + smallest).bits() + bias) >> dropped) - Bits::broadcast(smallest_normal >> dropped);
    const Bits code = maximum(normal, subnormal);
    if (kSigned) return code | ((x.bits() >> 24) & Bits::broadcast(0x80));
    // What is divided by never becomes zero.
    return maximum(code, minimum(bits, Bits::broadcast(1)));
  }
};

using SignedSmallFloat = SmallFloat<3, true>;
using UnsignedSmallFloat = SmallFloat<4, false>;

constexpr std::uint32_t kNotFinite = 255;  // the scale of a block with such a number: all of them are NaN

// The scale of a block whose largest magnitude has these bits: none of its numbers is rounded up to 2.
inline std::uint32_t scale_of(std::uint32_t largest) {
  if (largest == 0) return 0;
  const std::uint32_t exponent = (largest + (1U << SignedSmallFloat::dropped) - 1) >> 23;
  return exponent == 0 ? 1 : exponent;
}

// What decodes: 2^(scale - 127), 0 in a block of zeros.
inline std::uint32_t bits_of_scale(std::uint32_t scale) {
  return scale == kNotFinite ? 0x7FC00000U : scale << 23;
}

// What encodes: its inverse, in a block of finite numbers.
inline std::uint32_t bits_of_inverse(std::uint32_t scale) {
  if (scale == 254) return 0x00400000U;
  return (254 - (scale == 0 ? 1 : scale)) << 23;
}

// Two codes in each lane, of an even and an odd element.
template <class Format, class V>
KERNEL_INLINE Pair<V> decode_pair(const std::uint8_t* from, V scale) {
  using Bits = typename V::Bits;
  const Bits raw = Bits::load_raw(from);
  return {Format::decode(raw & Bits::broadcast(0xFF), scale), Format::decode(raw >> 16, scale)};
}
template <class Format, class V>
KERNEL_INLINE void encode_pair(Pair<V> x, V inverse_scale, Pair<typename V::Bits> bias, std::uint8_t* to) {
  const auto even = Format::encode(x.first, inverse_scale, bias.first);
  const auto odd = Format::encode(x.second, inverse_scale, bias.second);
  (even | (odd << 16)).store_raw(to);
}

template <class V>
KERNEL_INLINE typename V::Bits larger_magnitude(typename V::Bits largest, Pair<V> x) {
  using Bits = typename V::Bits;
  const Bits all_but_sign = Bits::broadcast(0x7FFFFFFF);
  return maximum(largest, maximum(x.first.bits() & all_but_sign, x.second.bits() & all_but_sign));
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
  const Bits half = Bits::broadcast(1U << (Format::dropped - 1));
  for (std::size_t i = 0; i < kBlockLength; i += 2 * V::width) {
    encode_pair<Format>(load<V, Order::interleaved>(whole + i), inverse, {half, half}, codes + i);
  }
}

template <class V, class Format>
void dequantize_block(float* whole, const std::uint8_t* codes, const std::uint8_t* scale) {
  const V factor = V::from_bits(V::Bits::broadcast(bits_of_scale(*scale)));
  for (std::size_t i = 0; i < kBlockLength; i += 2 * V::width) {
    store<Order::interleaved>(decode_pair<Format>(codes + i, factor), whole + i);
  }
}

// Calls `whole_block(i, b)` for element i where block b begins, and `cut_block(i, b, lead, count)` for what
// there is of a block, which begins with its element `lead`.
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

// A rule whose first state has a sign, and whose second, if any, has none. A block is decoded and updated,
// and when the largest of its new numbers are known, encoded again; the new state rests in the caches
// between. The parameter is updated by the state before it is rounded.
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
    // Blocks have whole vectors: they are all aligned, or none is.
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
      const Pair<V> m = decode_pair<SignedSmallFloat>(at.codes[0] + i, scales[0]);
      first[0] = m.first;
      second[0] = m.second;
      if (kStates > 1) {
        const Pair<V> v = decode_pair<UnsignedSmallFloat>(at.codes[kStates - 1] + i, scales[kStates - 1]);
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
      encode_pair<SignedSmallFloat>(Pair<V>{V::load(states[0] + i), V::load(states[0] + i + V::width)},
                                    inverse[0], biases(random.first), at.codes[0] + i);
      if (kStates > 1) {
        const float* const from = states[kStates - 1] + i;
        encode_pair<UnsignedSmallFloat>(Pair<V>{V::load(from), V::load(from + V::width)},
                                        inverse[kStates - 1], biases(random.second),
                                        at.codes[kStates - 1] + i);
      }
    }
  }

  // What is rounded up with the probability that the dropped bits give: 16 random bits for each element, at
  // the upper end of those.
  KERNEL_INLINE static Pair<Bits> biases(Bits random) {
    constexpr int kShift = SignedSmallFloat::dropped - 16;
    return {(random & Bits::broadcast(0xFFFF)) << kShift, (random >> 16) << kShift};
  }

  // A number that is not finite spoils all the state of its block.
  [[gnu::noinline]] static void poison(const Pointers& at) {
    for (int k = 0; k < kStates; ++k) {
      *at.scales[k] = static_cast<std::uint8_t>(kNotFinite);
      std::memset(at.codes[k], 0, kBlockLength);
    }
  }

  // Part of a block, beginning with its element `lead`: in a padded copy. Zeros change no scale.
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
  const std::size_t first_index_;  // in the stream
};

}  // namespace
}  // namespace lightning_zero
