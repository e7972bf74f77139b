// Sixteen fp32 lanes: AVX-512 F, BW, DQ and VL. Internal linkage, as in scalar.h.
//
// bf16 is rounded with integer operations: the AVX512_BF16 instruction would flush subnormal numbers.
#pragma once

#include <immintrin.h>

#include <cstddef>

#include "simd/types.h"

namespace lightning_zero {
namespace {

struct Avx512Float {
  static constexpr std::size_t width = 16;
  __m512 value;

  static Avx512Float broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Avx512Float load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Avx512Float load(const BFloat16* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Avx512Float load(const Float16* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  }

  void store(float* to) const { _mm512_storeu_ps(to, value); }
  void store(BFloat16* to) const {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i tie = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(tie, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i half = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(half));
  }
  void store(Float16* to) const {
    const __m256i half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
  }

  friend Avx512Float operator+(Avx512Float a, Avx512Float b) { return {_mm512_add_ps(a.value, b.value)}; }
  friend Avx512Float operator-(Avx512Float a, Avx512Float b) { return {_mm512_sub_ps(a.value, b.value)}; }
  friend Avx512Float operator*(Avx512Float a, Avx512Float b) { return {_mm512_mul_ps(a.value, b.value)}; }
  friend Avx512Float operator/(Avx512Float a, Avx512Float b) { return {_mm512_div_ps(a.value, b.value)}; }
  friend Avx512Float sqrt(Avx512Float a) { return {_mm512_sqrt_ps(a.value)}; }
  friend Avx512Float fma(Avx512Float a, Avx512Float b, Avx512Float c) {
    return {_mm512_fmadd_ps(a.value, b.value, c.value)};
  }
};

}  // namespace
}  // namespace lightning_zero
