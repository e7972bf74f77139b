// Eight fp32 lanes with AVX2, FMA and F16C. Internal linkage, as in scalar.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "simd/types.h"

namespace lightning_zero {
namespace {

// Eight unsigned 32-bit lanes.
struct Avx2Bits {
  __m256i value;

  static Avx2Bits broadcast(std::uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
  static Avx2Bits iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
  static Avx2Bits load(const std::uint16_t* from) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  static Avx2Bits load(const std::int16_t* from) {
    return {_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }

  // Sixteen 16-bit elements, two to a lane.
  static Avx2Bits load_raw(const std::uint16_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
  }

  // Stores sixteen 8-bit elements, two from each lane, from its lower and its upper half.
  void store_raw(std::uint8_t* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packus_epi16(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1)));
  }

  // Bypasses the caches if `stream`; the address must then be aligned to a vector.
  void store_raw(std::uint16_t* to, bool stream) const {
    auto* const address = reinterpret_cast<__m256i*>(to);
    stream ? _mm256_stream_si256(address, value) : _mm256_storeu_si256(address, value);
  }
  // Stores the lower halves of the lanes of `first`, then those of `second`.
  static void store_lower(Avx2Bits first, Avx2Bits second, std::uint16_t* to, bool stream) {
    const __m256i mask = _mm256_set1_epi32(0xFFFF);
    const __m256i packed =
        _mm256_packus_epi32(_mm256_and_si256(first.value, mask), _mm256_and_si256(second.value, mask));
    Avx2Bits{_mm256_permute4x64_epi64(packed, 0xD8)}.store_raw(to, stream);
  }

  friend Avx2Bits operator+(Avx2Bits a, Avx2Bits b) { return {_mm256_add_epi32(a.value, b.value)}; }
  friend Avx2Bits operator-(Avx2Bits a, Avx2Bits b) { return {_mm256_sub_epi32(a.value, b.value)}; }
  friend Avx2Bits operator*(Avx2Bits a, Avx2Bits b) { return {_mm256_mullo_epi32(a.value, b.value)}; }
  friend Avx2Bits operator&(Avx2Bits a, Avx2Bits b) { return {_mm256_and_si256(a.value, b.value)}; }
  friend Avx2Bits operator|(Avx2Bits a, Avx2Bits b) { return {_mm256_or_si256(a.value, b.value)}; }
  friend Avx2Bits operator^(Avx2Bits a, Avx2Bits b) { return {_mm256_xor_si256(a.value, b.value)}; }
  friend Avx2Bits operator<<(Avx2Bits a, int n) { return {_mm256_slli_epi32(a.value, n)}; }
  friend Avx2Bits operator>>(Avx2Bits a, int n) { return {_mm256_srli_epi32(a.value, n)}; }
  // The minimum of signed numbers.
  friend Avx2Bits minimum(Avx2Bits a, Avx2Bits b) { return {_mm256_min_epi32(a.value, b.value)}; }
  friend Avx2Bits maximum(Avx2Bits a, Avx2Bits b) { return {_mm256_max_epi32(a.value, b.value)}; }
  friend Avx2Bits shift_right_signed(Avx2Bits a, int n) { return {_mm256_srai_epi32(a.value, n)}; }
  // (a & mask) | b
  friend Avx2Bits masked_or(Avx2Bits a, Avx2Bits mask, Avx2Bits b) { return (a & mask) | b; }
  // The lower half of each lane of `low` beside the upper half of that of `high`.
  friend Avx2Bits join_halves(Avx2Bits low, Avx2Bits high) {
    return {_mm256_blend_epi16(low.value, high.value, 0xAA)};
  }
};

struct Avx2Float {
  using Bits = Avx2Bits;
  static constexpr std::size_t width = 8;
  __m256 value;

  static Avx2Float broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Avx2Float from_bits(Bits bits) { return {_mm256_castsi256_ps(bits.value)}; }
  static Avx2Float load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Avx2Float load(const Float16* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }

  // Loads the even and the odd ones of sixteen 8-bit elements, each as the fp16 number with its bits shifted
  // by 6.
  static void load_halves(const std::uint8_t* from, bool is_signed, Avx2Float& even, Avx2Float& odd) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i mask = _mm_set1_epi16(static_cast<short>(is_signed ? 0x9FC0 : 0x3FC0));
    const __m128i first = is_signed ? _mm_srai_epi16(_mm_slli_epi16(raw, 8), 2) : _mm_slli_epi16(raw, 6);
    const __m128i second = is_signed ? _mm_srai_epi16(raw, 2) : _mm_srli_epi16(raw, 2);
    even = {_mm256_cvtph_ps(_mm_and_si128(first, mask))};
    odd = {_mm256_cvtph_ps(_mm_and_si128(second, mask))};
  }

  Bits bits() const { return {_mm256_castps_si256(value)}; }
  void store(float* to) const { _mm256_storeu_ps(to, value); }
  static void store_pair(Avx2Float first, Avx2Float second, Float16* to, bool stream) {
    Avx2Bits{_mm256_set_m128i(second.to_half(), first.to_half())}.store_raw(&to->bits, stream);
  }

  friend Avx2Float operator+(Avx2Float a, Avx2Float b) { return {_mm256_add_ps(a.value, b.value)}; }
  friend Avx2Float operator-(Avx2Float a, Avx2Float b) { return {_mm256_sub_ps(a.value, b.value)}; }
  friend Avx2Float operator*(Avx2Float a, Avx2Float b) { return {_mm256_mul_ps(a.value, b.value)}; }
  friend Avx2Float operator/(Avx2Float a, Avx2Float b) { return {_mm256_div_ps(a.value, b.value)}; }
  friend Avx2Float sqrt(Avx2Float a) { return {_mm256_sqrt_ps(a.value)}; }
  friend Avx2Float fma(Avx2Float a, Avx2Float b, Avx2Float c) {
    return {_mm256_fmadd_ps(a.value, b.value, c.value)};
  }
  friend Avx2Float round_to_float16(Avx2Float a) { return {_mm256_cvtph_ps(a.to_half())}; }
  friend Avx2Float maximum(Avx2Float a, Avx2Float b) {
    // The instruction returns its second operand if either is NaN.
    const __m256 nan = _mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q);
    return {_mm256_blendv_ps(_mm256_max_ps(a.value, b.value), a.value, nan)};
  }
  friend Avx2Float sign(Avx2Float a) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 above = _mm256_and_ps(_mm256_cmp_ps(a.value, zero, _CMP_GT_OQ), _mm256_set1_ps(1.0F));
    const __m256 below = _mm256_and_ps(_mm256_cmp_ps(a.value, zero, _CMP_LT_OQ), _mm256_set1_ps(1.0F));
    return {_mm256_sub_ps(above, below)};
  }
  // For each lane `if_nan` if `a` is NaN, else `otherwise`.
  friend Bits select_nan(Avx2Float a, Bits if_nan, Bits otherwise) {
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q));
    return {_mm256_blendv_epi8(otherwise.value, if_nan.value, nan)};
  }
  friend bool any_nan(Avx2Float a, Avx2Float b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.value, b.value, _CMP_UNORD_Q)) != 0;
  }
  // From sixteen consecutive elements to the even and the odd ones, and back.
  friend void deinterleave(Avx2Float& a, Avx2Float& b) {
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(a.value, b.value, 0x88));
    const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(a.value, b.value, 0xDD));
    a = {_mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xD8))};
    b = {_mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xD8))};
  }
  friend void interleave(Avx2Float& a, Avx2Float& b) {
    const __m256 low = _mm256_unpacklo_ps(a.value, b.value);
    const __m256 high = _mm256_unpackhi_ps(a.value, b.value);
    a = {_mm256_permute2f128_ps(low, high, 0x20)};
    b = {_mm256_permute2f128_ps(low, high, 0x31)};
  }

 private:
  __m128i to_half() const { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
};

// Sixteen sums of squares in double.
struct Avx2Squares {
  using Float = Avx2Float;
  __m256d lanes[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};

  // Adds the squares of elements i, i + 1, ..., where i is the position of the first among sixteen.
  void add(Avx2Float x, std::size_t i) {
    add_half(lanes[i % 16 / 4], _mm256_castps256_ps128(x.value));
    add_half(lanes[i % 16 / 4 + 1], _mm256_extractf128_ps(x.value, 1));
  }
  void add(const Avx2Squares& other) {
    for (int k = 0; k < 4; ++k) lanes[k] = _mm256_add_pd(lanes[k], other.lanes[k]);
  }
  void store(double* to) const {
    for (int k = 0; k < 4; ++k) _mm256_storeu_pd(to + 4 * k, lanes[k]);
  }

 private:
  static void add_half(__m256d& sum, __m128 x) {
    const __m256d wide = _mm256_cvtps_pd(x);
    sum = _mm256_fmadd_pd(wide, wide, sum);  // the product is exact: fused or not, the sum is the same
  }
};

}  // namespace
}  // namespace lightning_zero
