// Eight fp32 lanes: AVX2, FMA and F16C. Internal linkage, as in scalar.h.
#pragma once

#include <immintrin.h>

#include <cstddef>

#include "simd/types.h"

namespace lightning_zero {
namespace {

struct Avx2Float {
  static constexpr std::size_t width = 8;
  __m256 value;

  static Avx2Float broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Avx2Float load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Avx2Float load(const BFloat16* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Avx2Float load(const Float16* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }

  void store(float* to) const { _mm256_storeu_ps(to, value); }
  void store(BFloat16* to) const {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i tie = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(tie, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i half = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }
  void store(Float16* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  friend Avx2Float operator+(Avx2Float a, Avx2Float b) { return {_mm256_add_ps(a.value, b.value)}; }
  friend Avx2Float operator-(Avx2Float a, Avx2Float b) { return {_mm256_sub_ps(a.value, b.value)}; }
  friend Avx2Float operator*(Avx2Float a, Avx2Float b) { return {_mm256_mul_ps(a.value, b.value)}; }
  friend Avx2Float operator/(Avx2Float a, Avx2Float b) { return {_mm256_div_ps(a.value, b.value)}; }
  friend Avx2Float sqrt(Avx2Float a) { return {_mm256_sqrt_ps(a.value)}; }
  friend Avx2Float fma(Avx2Float a, Avx2Float b, Avx2Float c) {
    return {_mm256_fmadd_ps(a.value, b.value, c.value)};
  }
};

}  // namespace
}  // namespace lightning_zero
