// Conversions between fp32 lanes and the formats in memory, written once for all vector types V.
//
// Kernels process two vectors at a time. Everything has internal linkage, because each target compiles it
// with different flags; for the same reason no inline function of the standard library is called.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lightning_zero/update.h"
#include "simd/types.h"

namespace lightning_zero {
namespace {

// Inlining is forced, because the compiler underestimates the cost of a call in the inner loop, which would
// pass vectors through memory.
#ifdef LIGHTNING_ZERO_SANITIZED  // with sanitizers, forced inlining takes the compiler minutes
#define KERNEL_INLINE inline
#else
#define KERNEL_INLINE [[gnu::always_inline]] inline
#endif

inline bool unlikely(bool condition) { return __builtin_expect(condition, false); }

template <class V>
struct Pair {
  V first, second;
};

// The distribution of 2 x width elements over two vectors: the first and the second half, or the even and the
// odd elements, which is how 16-bit elements lie in 32-bit lanes.
enum class Order { consecutive, interleaved };

template <Order kOrder, class V>
KERNEL_INLINE Pair<V> ordered(Pair<V> x) {
  if (kOrder == Order::interleaved) deinterleave(x.first, x.second);
  return x;
}
template <Order kOrder, class V>
KERNEL_INLINE Pair<V> consecutive(Pair<V> x) {
  if (kOrder == Order::interleaved) interleave(x.first, x.second);
  return x;
}

template <class V, Order kOrder>
KERNEL_INLINE Pair<V> load(const float* from) {
  return ordered<kOrder, V>({V::load(from), V::load(from + V::width)});
}
template <class V, Order kOrder>
KERNEL_INLINE Pair<V> load(const Float16* from) {
  return ordered<kOrder, V>({V::load(from), V::load(from + V::width)});
}
template <class V, Order kOrder>
KERNEL_INLINE Pair<V> load(const BFloat16* from) {
  using Bits = typename V::Bits;
  if (kOrder == Order::interleaved) {
    const Bits raw = Bits::load_raw(&from->bits);
    return {V::from_bits(raw << 16), V::from_bits(raw & Bits::broadcast(0xFFFF0000U))};
  }
  return {V::from_bits(Bits::load(&from->bits) << 16),
          V::from_bits(Bits::load(&from->bits + V::width) << 16)};
}

template <Order kOrder, class V>
KERNEL_INLINE void store(Pair<V> x, float* to) {
  x = consecutive<kOrder>(x);
  x.first.store(to);
  x.second.store(to + V::width);
}

// Stores bf16 numbers from the upper halves of lanes; the lower halves are ignored.
template <Order kOrder, class Bits>
KERNEL_INLINE void store_upper(Bits first, Bits second, std::uint16_t* to, bool stream) {
  if (kOrder == Order::interleaved) {
    join_halves(first >> 16, second).store_raw(to, stream);
  } else {
    Bits::store_lower(first >> 16, second >> 16, to, stream);
  }
}

// The bits of `x` plus a bias of less than 2^16; the upper halves are `x` rounded to bf16. A NaN, which the
// bias might turn into another number, becomes the positive quiet NaN.
template <class V>
KERNEL_INLINE Pair<typename V::Bits> biased(Pair<V> x, typename V::Bits first_bias,
                                            typename V::Bits second_bias) {
  using Bits = typename V::Bits;
  Bits first = x.first.bits() + first_bias;
  Bits second = x.second.bits() + second_bias;
  if (unlikely(any_nan(x.first, x.second))) {
    first = select_nan(x.first, Bits::broadcast(0x7FC00000U), first);
    second = select_nan(x.second, Bits::broadcast(0x7FC00000U), second);
  }
  return {first, second};
}

// ---- 16-bit copies ----

template <Order kOrder, class V>
KERNEL_INLINE void store_copy(Pair<V> x, Float16* to, bool stream) {
  x = consecutive<kOrder>(x);
  V::store_pair(x.first, x.second, to, stream);
}
// Bits whose upper halves are `x` rounded to bf16, ties to even.
template <class V>
KERNEL_INLINE Pair<typename V::Bits> rounded_bits(Pair<V> x) {
  using Bits = typename V::Bits;
  const Bits one = Bits::broadcast(1);
  const Bits half = Bits::broadcast(0x7FFF);
  return biased(x, half + ((x.first.bits() >> 16) & one), half + ((x.second.bits() >> 16) & one));
}

template <Order kOrder, class V>
KERNEL_INLINE void store_copy(Pair<V> x, BFloat16* to, bool stream) {
  const Pair<typename V::Bits> bits = rounded_bits(x);
  store_upper<kOrder>(bits.first, bits.second, &to->bits, stream);
}
template <Order kOrder, class V>
KERNEL_INLINE void store_copy(Pair<V> x, BFloat16Away* to, bool stream) {
  using Bits = typename V::Bits;
  const Pair<Bits> bits = biased(x, Bits::broadcast(0x8000), Bits::broadcast(0x8000));
  store_upper<kOrder>(bits.first, bits.second, &to->bits, stream);
}

// ---- master parameters ----

// Each layout has two arrays: the parameter is read from and written to `First`; `Second` accompanies it.

// An fp32 master, and a copy of it (which may be absent).
template <class Copy>
struct WholeMaster {
  using First = float;
  using Second = Copy;
  static constexpr bool streams = true;

  template <class V, Order kOrder>
  KERNEL_INLINE static Pair<V> load(const First* first, const Second*) {
    return lightning_zero::load<V, kOrder>(first);
  }
  template <Order kOrder, class V>
  KERNEL_INLINE static void store(Pair<V> p, First* first, Second* second, bool stream) {
    lightning_zero::store<kOrder>(p, first);
    if (second != nullptr) store_copy<kOrder>(p, second, stream);
  }
};

// An fp32 number as the nearest bf16 number and the signed 16-bit distance to it, in units of the last fp32
// bit. Ties go away from zero; with ties to even, an even number would need one more distance than 16 bits
// represent.
struct SplitBFloat16 {
  using First = BFloat16;
  using Second = std::int16_t;
  static constexpr bool streams = false;

  template <class V, Order kOrder>
  KERNEL_INLINE static Pair<V> load(const First* first, const Second* second) {
    using Bits = typename V::Bits;
    const Pair<V> high = lightning_zero::load<V, kOrder>(first);
    Pair<Bits> low;
    if (kOrder == Order::interleaved) {
      const Bits raw = Bits::load_raw(reinterpret_cast<const std::uint16_t*>(second));
      low = {shift_right_signed(raw << 16, 16), shift_right_signed(raw, 16)};
    } else {
      low = {Bits::load(second), Bits::load(second + V::width)};
    }
    Pair<V> p = {V::from_bits(high.first.bits() + low.first), V::from_bits(high.second.bits() + low.second)};
    if (unlikely(any_nan(p.first, p.second))) {
      // User code has overwritten a number by zero or infinity, and its old distance must be ignored.
      p = {V::from_bits(select_nan(p.first, high.first.bits(), p.first.bits())),
           V::from_bits(select_nan(p.second, high.second.bits(), p.second.bits()))};
    }
    return p;
  }
  template <Order kOrder, class V>
  KERNEL_INLINE static void store(Pair<V> p, First* first, Second* second, bool) {
    using Bits = typename V::Bits;
    const Pair<Bits> high = biased(p, Bits::broadcast(0x8000), Bits::broadcast(0x8000));
    store_upper<kOrder>(high.first, high.second, &first->bits, false);
    Bits low = p.first.bits();
    Bits other_low = p.second.bits();
    if (unlikely(any_nan(p.first, p.second))) {
      low = select_nan(p.first, Bits::broadcast(0), low);
      other_low = select_nan(p.second, Bits::broadcast(0), other_low);
    }
    auto* const to = reinterpret_cast<std::uint16_t*>(second);
    if (kOrder == Order::interleaved) {
      join_halves(low, other_low << 16).store_raw(to, false);
    } else {
      Bits::store_lower(low, other_low, to, false);
    }
  }
};

// An fp32 number p as the nearest fp16 number (ties to even) and the distance to it in units of 2^(e-25),
// where e is the exponent of the fp16 number, at least -14. Exact for 2^-16 <= |p| < 65520, within 2^-40
// below; from 65520 on, the fp16 number is infinite and so is the restored p.
struct SplitFloat16 {
  using First = Float16;
  using Second = std::int16_t;
  static constexpr bool streams = false;

  template <class V, Order kOrder>
  KERNEL_INLINE static Pair<V> load(const First* first, const Second* second) {
    return ordered<kOrder, V>({join(V::load(first), V::Bits::load(second)),
                               join(V::load(first + V::width), V::Bits::load(second + V::width))});
  }
  template <Order kOrder, class V>
  KERNEL_INLINE static void store(Pair<V> p, First* first, Second* second, bool) {
    p = consecutive<kOrder>(p);
    const Pair<V> high = {round_to_float16(p.first), round_to_float16(p.second)};
    V::store_pair(high.first, high.second, first, false);
    V::Bits::store_lower(distance(p.first, high.first), distance(p.second, high.second),
                         reinterpret_cast<std::uint16_t*>(second), false);
  }

 private:
  template <class V>
  KERNEL_INLINE static V join(V high, typename V::Bits distance) {
    using Bits = typename V::Bits;
    // Converts an integer to fp32 by adding it to the bits of 1.5 x 2^23, whose ulp is 1.
    const V units = V::from_bits(distance + magic<V>().bits()) - magic<V>();
    const V unit = V::from_bits(exponent_of(high) - Bits::broadcast(25U << 23));
    const V p = fma(units, unit, high);
    return V::from_bits(p.bits() | (high.bits() & Bits::broadcast(0x80000000U)));  // -0 + 0 would be +0
  }
  template <class V>
  KERNEL_INLINE static typename V::Bits distance(V p, V high) {
    using Bits = typename V::Bits;
    const V per_unit = V::from_bits(Bits::broadcast((2U * 127U + 25U) << 23) - exponent_of(high));
    const Bits units = ((p - high) * per_unit + magic<V>()).bits() - magic<V>().bits();
    // The distance is 0 for infinity and NaN, whose difference with itself is NaN.
    return select_nan(high - high, Bits::broadcast(0), units);
  }
  template <class V>
  KERNEL_INLINE static V magic() {
    return V::broadcast(0x1.8p23F);
  }
  // The exponent bits of max(|x|, 2^-14), at their position in fp32.
  template <class V>
  KERNEL_INLINE static typename V::Bits exponent_of(V x) {
    const V magnitude = V::from_bits(x.bits() & V::Bits::broadcast(0x7FFFFFFF));
    return maximum(magnitude, V::broadcast(0x1p-14F)).bits() & V::Bits::broadcast(0x7F800000);
  }
};

// ---- state of the optimizer ----

// Computes 64 random bits for each pair of elements 2k and 2k+1, in lane k: 16 bits per element for each of
// two states. The first 32 bits are Wellons' "lowbias32" hash of k, with a key added before and between its
// two rounds; the others are one more round of it.
template <class V>
class RandomBits {
 public:
  using Bits = typename V::Bits;

  explicit RandomBits(const RoundingStream& stream)
      : before_(Bits::broadcast(stream.before)), between_(Bits::broadcast(stream.between)) {}

  // The bits for the lanes that begin with element `index`, which must be even.
  KERNEL_INLINE Pair<Bits> at(std::size_t index) const {
    Bits x = (Bits::broadcast(static_cast<std::uint32_t>(index >> 1)) + Bits::iota()) ^ before_;
    x = (x ^ (x >> 16)) * Bits::broadcast(0x7FEB352DU);
    x = (x ^ (x >> 15)) + between_;
    x = x * Bits::broadcast(0x846CA68BU);
    x = x ^ (x >> 16);
    const Bits y = x * Bits::broadcast(0x9E3779B1U) + between_;
    return {x, y ^ (y >> 15)};
  }

 private:
  Bits before_, between_;
};

template <class V>
struct NoRandomBits {
  explicit NoRandomBits(const RoundingStream&) {}
  Pair<typename V::Bits> at(std::size_t) const { return {V::Bits::broadcast(0), V::Bits::broadcast(0)}; }
};

struct Float32State {
  using Element = float;
  static constexpr Order order = Order::consecutive;
  template <class V>
  using Random = NoRandomBits<V>;

  template <class V>
  KERNEL_INLINE static Pair<V> store(Pair<V> x, Element* to, typename V::Bits) {
    lightning_zero::store<order>(x, to);
    return x;
  }
};

// Stochastically rounded bf16: a number is rounded up with a probability proportional to its distance from
// the lower neighbour. So small contributions to a large moving average are not lost on average.
struct BFloat16State {
  using Element = BFloat16;
  static constexpr Order order = Order::interleaved;
  template <class V>
  using Random = RandomBits<V>;

  // Returns the stored values; the update uses these, so that it depends on the stored state only.
  template <class V>
  KERNEL_INLINE static Pair<V> store(Pair<V> x, Element* to, typename V::Bits random) {
    using Bits = typename V::Bits;
    const Bits upper = Bits::broadcast(0xFFFF0000U);
    const Pair<Bits> bits = biased(x, random & Bits::broadcast(0xFFFF), random >> 16);
    store_upper<order>(bits.first, bits.second, &to->bits, false);
    return {V::from_bits(bits.first & upper), V::from_bits(bits.second & upper)};
  }
};

}  // namespace
}  // namespace lightning_zero
