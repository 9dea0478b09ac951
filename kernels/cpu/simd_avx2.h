// Sixteen lanes in two registers: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace specserve::SPECSERVE_ISA {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
using Bytes = I;
constexpr bool kUnsignedWeights = false;  // dot4 takes the offset of int8 weights away
constexpr int kMaxRows = 2;
constexpr int kQueries = 2;

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float hmax(F x) {
  __m256 m = _mm256_max_ps(x.a, x.b);
  __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  n = _mm_max_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}
inline float hsum(F x) {
  __m256 m = _mm256_add_ps(x.a, x.b);
  __m128 n = _mm_add_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  n = _mm_add_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_add_ss(n, _mm_movehdup_ps(n)));
}
inline int32_t hsum(I x) {
  __m256i m = _mm256_add_epi32(x.a, x.b);
  __m128i n = _mm_add_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  n = _mm_add_epi32(n, _mm_shuffle_epi32(n, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(n, _mm_shuffle_epi32(n, 0xb1)));
}
inline bool any_nan(F x, F y) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, y.b, _CMP_UNORD_Q)));
}

inline I iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void store_int8(int8_t* p, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline __m256 power_of_two(__m256 n) {  // flushes to zero below the normal range
  const __m256i biased = _mm256_max_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), _mm256_setzero_si256());
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline F scale_by_power(F x, F n) {
  return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}

inline F load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256 widen_bfloat(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_bfloat(const uint16_t* p) { return {widen_bfloat(p), widen_bfloat(p + 8)}; }
inline __m256i round_bfloat(__m256 x) {  // to nearest even; a NaN stays one
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
}
inline void store_bfloat(uint16_t* p, F x) {
  const __m256i words = _mm256_packus_epi32(round_bfloat(x.a), round_bfloat(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xd8));
}

inline Bytes load_bytes(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Bytes spread(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return {_mm256_set1_epi32(four), _mm256_set1_epi32(four)};
}
inline Bytes low_nibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes high_nibbles(Bytes x) {
  return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
inline __m256i dot_half(__m256i sum, __m256i u, __m256i s) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
// |x| times weight with the sign of x: 2 * 127 * 127 fits the 16 bits of maddubs, 255 * 127 * 2 does not.
inline __m256i dot_signed(__m256i sum, __m256i stored, __m256i x) {
  const __m256i weights = _mm256_xor_si256(stored, _mm256_set1_epi8(-128));
  return dot_half(sum, _mm256_abs_epi8(x), _mm256_sign_epi8(weights, x));
}
inline I dot4(I sum, Bytes weights, Bytes x) {
  return {dot_signed(sum.a, weights.a, x.a), dot_signed(sum.b, weights.b, x.b)};
}
inline I dot4_unsigned(I sum, Bytes weights, Bytes x) {
  return {dot_half(sum.a, weights.a, x.a), dot_half(sum.b, weights.b, x.b)};
}
inline __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 odd(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}
inline F dot2(F sum, Bytes w, Bytes x) {
  return {_mm256_fmadd_ps(odd(w.a), odd(x.a), _mm256_fmadd_ps(even(w.a), even(x.a), sum.a)),
          _mm256_fmadd_ps(odd(w.b), odd(x.b), _mm256_fmadd_ps(even(w.b), even(x.b), sum.b))};
}

// 16 rows of 16 words, from rows[i] + start on, into 16 columns `stride` words apart: out[j * stride + i] = word j of row i.
inline void transpose(const uint16_t* const* rows, int start, uint32_t* out, int stride) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) std::memcpy(out + j * stride + i, rows[i] + start + 2 * j, 4);
}

// out[i] = even[i] and above it odd[i], for 32 words.
inline void interleave(const uint16_t* even, const uint16_t* odd, uint32_t* out) {
  for (int i = 0; i < 32; ++i) out[i] = uint32_t(even[i]) | uint32_t(odd[i]) << 16;
}

}  // namespace specserve::SPECSERVE_ISA
