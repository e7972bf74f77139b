// Sixteen fp32 lanes with AVX-512 F, BW, DQ and VL. Internal linkage, as in scalar.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "simd/types.h"

namespace lightning_zero {
namespace {

// Sixteen unsigned 32-bit lanes.
struct Avx512Bits {
  __m512i value;

  static Avx512Bits broadcast(std::uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
  static Avx512Bits iota() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
  }
  static Avx512Bits load(const std::uint16_t* from) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }
  static Avx512Bits load(const std::int16_t* from) {
    return {_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }

  // Thirty-two 16-bit elements, two to a lane.
  static Avx512Bits load_raw(const std::uint16_t* from) { return {_mm512_loadu_si512(from)}; }

  // Stores thirty-two 8-bit elements, two from each lane, from its lower and its upper half.
  void store_raw(std::uint8_t* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(value));
  }

  // Bypasses the caches if `stream`; the address must then be aligned to a vector.
  void store_raw(std::uint16_t* to, bool stream) const {
    stream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value) : _mm512_storeu_si512(to, value);
  }
  // Stores the lower halves of the lanes of `first`, then those of `second`.
  static void store_lower(Avx512Bits first, Avx512Bits second, std::uint16_t* to, bool stream) {
    alignas(64) static constexpr std::uint16_t kEven[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                            22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                            44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    const __m512i even = _mm512_load_si512(kEven);
    Avx512Bits{_mm512_permutex2var_epi16(first.value, even, second.value)}.store_raw(to, stream);
  }

  friend Avx512Bits operator+(Avx512Bits a, Avx512Bits b) { return {_mm512_add_epi32(a.value, b.value)}; }
  friend Avx512Bits operator-(Avx512Bits a, Avx512Bits b) { return {_mm512_sub_epi32(a.value, b.value)}; }
  friend Avx512Bits operator*(Avx512Bits a, Avx512Bits b) { return {_mm512_mullo_epi32(a.value, b.value)}; }
  friend Avx512Bits operator&(Avx512Bits a, Avx512Bits b) { return {_mm512_and_si512(a.value, b.value)}; }
  friend Avx512Bits operator|(Avx512Bits a, Avx512Bits b) { return {_mm512_or_si512(a.value, b.value)}; }
  friend Avx512Bits operator^(Avx512Bits a, Avx512Bits b) { return {_mm512_xor_si512(a.value, b.value)}; }
  friend Avx512Bits operator<<(Avx512Bits a, unsigned n) { return {_mm512_slli_epi32(a.value, n)}; }
  friend Avx512Bits operator>>(Avx512Bits a, unsigned n) { return {_mm512_srli_epi32(a.value, n)}; }
  // The minimum of signed numbers.
  friend Avx512Bits minimum(Avx512Bits a, Avx512Bits b) { return {_mm512_min_epi32(a.value, b.value)}; }
  friend Avx512Bits maximum(Avx512Bits a, Avx512Bits b) { return {_mm512_max_epi32(a.value, b.value)}; }
  friend Avx512Bits shift_right_signed(Avx512Bits a, unsigned n) { return {_mm512_srai_epi32(a.value, n)}; }
  // (a & mask) | b
  friend Avx512Bits masked_or(Avx512Bits a, Avx512Bits mask, Avx512Bits b) {
    return {_mm512_ternarylogic_epi32(a.value, mask.value, b.value, 0xEA)};
  }
  // The lower half of each lane of `low` beside the upper half of that of `high`.
  friend Avx512Bits join_halves(Avx512Bits low, Avx512Bits high) {
    constexpr int kSelect = 0xCA;  // the first operand selects between the others, bit by bit
    return {_mm512_ternarylogic_epi32(_mm512_set1_epi32(0xFFFF), low.value, high.value, kSelect)};
  }
};

struct Avx512Float {
  using Bits = Avx512Bits;
  static constexpr std::size_t width = 16;
  __m512 value;

  static Avx512Float broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Avx512Float from_bits(Bits bits) { return {_mm512_castsi512_ps(bits.value)}; }
  static Avx512Float load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Avx512Float load(const Float16* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }

  // Loads the even and the odd ones of thirty-two 8-bit elements, each as the fp16 number with its bits
  // shifted by 6.
  static void load_halves(const std::uint8_t* from, bool is_signed, Avx512Float& even, Avx512Float& odd) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i mask = _mm256_set1_epi16(static_cast<short>(is_signed ? 0x9FC0 : 0x3FC0));
    const __m256i first =
        is_signed ? _mm256_srai_epi16(_mm256_slli_epi16(raw, 8), 2) : _mm256_slli_epi16(raw, 6);
    const __m256i second = is_signed ? _mm256_srai_epi16(raw, 2) : _mm256_srli_epi16(raw, 2);
    even = {_mm512_cvtph_ps(_mm256_and_si256(first, mask))};
    odd = {_mm512_cvtph_ps(_mm256_and_si256(second, mask))};
  }

  Bits bits() const { return {_mm512_castps_si512(value)}; }
  void store(float* to) const { _mm512_storeu_ps(to, value); }
  static void store_pair(Avx512Float first, Avx512Float second, Float16* to, bool stream) {
    const __m512i low = _mm512_castsi256_si512(first.to_half());
    Avx512Bits{_mm512_inserti64x4(low, second.to_half(), 1)}.store_raw(&to->bits, stream);
  }

  friend Avx512Float operator+(Avx512Float a, Avx512Float b) { return {_mm512_add_ps(a.value, b.value)}; }
  friend Avx512Float operator-(Avx512Float a, Avx512Float b) { return {_mm512_sub_ps(a.value, b.value)}; }
  friend Avx512Float operator*(Avx512Float a, Avx512Float b) { return {_mm512_mul_ps(a.value, b.value)}; }
  friend Avx512Float operator/(Avx512Float a, Avx512Float b) { return {_mm512_div_ps(a.value, b.value)}; }
  friend Avx512Float sqrt(Avx512Float a) { return {_mm512_sqrt_ps(a.value)}; }
  friend Avx512Float fma(Avx512Float a, Avx512Float b, Avx512Float c) {
    return {_mm512_fmadd_ps(a.value, b.value, c.value)};
  }
  friend Avx512Float round_to_float16(Avx512Float a) { return {_mm512_cvtph_ps(a.to_half())}; }
  friend Avx512Float maximum(Avx512Float a, Avx512Float b) {
    // The instruction returns its second operand if either is NaN.
    return {_mm512_mask_mov_ps(_mm512_max_ps(a.value, b.value), nan_lanes(a), a.value)};
  }
  friend Avx512Float sign(Avx512Float a) {
    const __m512 zero = _mm512_setzero_ps();
    const __mmask16 above = _mm512_cmp_ps_mask(a.value, zero, _CMP_GT_OQ);
    const __mmask16 below = _mm512_cmp_ps_mask(a.value, zero, _CMP_LT_OQ);
    return {
        _mm512_mask_mov_ps(_mm512_maskz_mov_ps(above, _mm512_set1_ps(1.0F)), below, _mm512_set1_ps(-1.0F))};
  }
  // For each lane `if_nan` if `a` is NaN, else `otherwise`.
  friend Bits select_nan(Avx512Float a, Bits if_nan, Bits otherwise) {
    return {_mm512_mask_mov_epi32(otherwise.value, nan_lanes(a), if_nan.value)};
  }
  friend bool any_nan(Avx512Float a, Avx512Float b) {
    return _mm512_cmp_ps_mask(a.value, b.value, _CMP_UNORD_Q) != 0;
  }
  // From thirty-two consecutive elements to the even and the odd ones, and back.
  friend void deinterleave(Avx512Float& a, Avx512Float& b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __m512 first = a.value;
    a = {_mm512_permutex2var_ps(first, even, b.value)};
    b = {_mm512_permutex2var_ps(first, odd, b.value)};
  }
  friend void interleave(Avx512Float& a, Avx512Float& b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    const __m512 even = a.value;
    a = {_mm512_permutex2var_ps(even, low, b.value)};
    b = {_mm512_permutex2var_ps(even, high, b.value)};
  }

 private:
  __m256i to_half() const { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __mmask16 nan_lanes(Avx512Float a) { return _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q); }
};

// Sixteen sums of squares in double.
struct Avx512Squares {
  using Float = Avx512Float;
  __m512d lanes[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};

  // Adds the squares of sixteen elements, the first of which has an index that is a multiple of sixteen.
  void add(Avx512Float x, std::size_t) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x.value));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.value, 1));
    // The products are exact: fused or not, the sums are the same.
    lanes[0] = _mm512_fmadd_pd(low, low, lanes[0]);
    lanes[1] = _mm512_fmadd_pd(high, high, lanes[1]);
  }
  void add(const Avx512Squares& other) {
    for (int k = 0; k < 2; ++k) lanes[k] = _mm512_add_pd(lanes[k], other.lanes[k]);
  }
  void store(double* to) const {
    _mm512_storeu_pd(to, lanes[0]);
    _mm512_storeu_pd(to + 8, lanes[1]);
  }
};

}  // namespace
}  // namespace lightning_zero
