// Vectors of eight floats, as AVX2 with FMA and F16C has them: all but products of integers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace specserve::SPECSERVE_ISA {

constexpr int kLanes = 8;
using F = __m256;
using I = __m256i;
using Bytes = __m256i;
constexpr int kMaxRows = 2;
constexpr int kQueries = 3;
constexpr int kBfloat16Queries = 2;
constexpr int kHalfQueries = 24;  // with more of them float16 is widened once for all

inline F zero() { return _mm256_setzero_ps(); }
inline F set(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline float hmax(F a) {
  __m128 n = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  n = _mm_max_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}
inline float hsum(F a) {
  __m128 n = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  n = _mm_add_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_add_ss(n, _mm_movehdup_ps(n)));
}
inline int32_t hsum(I a) {
  __m128i n = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  n = _mm_add_epi32(n, _mm_shuffle_epi32(n, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(n, _mm_shuffle_epi32(n, 0xb1)));
}
inline bool any_nan(F a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }

inline I iset(int32_t x) { return _mm256_set1_epi32(x); }
inline I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
inline F to_float(I a) { return _mm256_cvtepi32_ps(a); }
inline I to_int(F a) { return _mm256_cvtps_epi32(a); }
inline void store_int8(int8_t* p, I a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
inline F scale_by_power(F a, F n) {  // flushes to zero below the normal range
  const I biased = _mm256_max_epi32(_mm256_add_epi32(to_int(n), iset(127)), _mm256_setzero_si256());
  return mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

inline F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store_half(uint16_t* p, F a) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
inline F load_bfloat(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void store_bfloat(uint16_t* p, F a) {  // to nearest even; a NaN stays one
  const I bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), iset(1));
  const I rounded = iadd(bits, iadd(odd, iset(0x7fff))), is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const I words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, iset(0x7fc00000), is_nan), 16);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline Bytes load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Bytes spread(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return iset(four);
}
inline Bytes low_nibbles(Bytes a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
inline F even(Bytes pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline F odd(Bytes pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, iset((int)0xffff0000))); }
inline F dot2(F sum, Bytes weights, Bytes x) { return fma(odd(weights), odd(x), fma(even(weights), even(x), sum)); }

}  // namespace specserve::SPECSERVE_ISA
