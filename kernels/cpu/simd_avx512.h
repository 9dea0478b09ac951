// Vectors of sixteen floats: AVX-512 with VNNI and BF16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace specserve::SPECSERVE_ISA {

constexpr int kLanes = 16;  // floats in a vector
using F = __m512;
using I = __m512i;
using Bytes = __m512i;  // kLanes times 4 bytes
constexpr int kMaxRows = 8;              // rows that share the registers of one tile
constexpr int kMaxIntRows = 8;           // of one of integers: at least as many
inline int most_int8_rows(int) { return kMaxIntRows; }
constexpr int kIntVectors = 2;           // vectors of a tile of integers that are in registers at a time
constexpr int kQueries = 6;              // query rows that share those of attention, of float32
constexpr int kBfloat16Queries = 6;      // and where the cache is bfloat16: at most as many
constexpr int kHalfQueries = 6;          // with more of them float16 is widened once for all

inline F zero() { return _mm512_setzero_ps(); }
inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline float hmax(F a) { return _mm512_reduce_max_ps(a); }
// Sums add lane i and lane i + kLanes / 2, then the halves of what is left, and so on.
inline float hsum(F a) { return _mm512_reduce_add_ps(a); }
inline int32_t hsum(I a) { return _mm512_reduce_add_epi32(a); }
inline bool any_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }

inline I iset(int32_t x) { return _mm512_set1_epi32(x); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I to_int(F a) { return _mm512_cvtps_epi32(a); }  // to nearest, ties to even
inline void store_int8(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a)); }
// a * 2^n for whole n within the range of exponents.
inline F scale_by_power(F a, F n) { return _mm512_scalef_ps(a, n); }

inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_half(uint16_t* p, F a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline F load_bfloat(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_bfloat(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a)); }

inline Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline Bytes spread(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
inline Bytes low_nibbles(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
// By number what the peak of its group must be at least: the peak becomes 127, and dot4 has to hold the products.
inline F least_peak(F a) { return abs(a); }
// Each lane: sum += its four weights as they are stored, offset by 128, times its four activations.
inline I dot4(I sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
// The same of weights from 0 to 15, of at most a group; `whole` makes integers of 32 bits of that sum.
inline I dot_nibbles(I sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
inline I whole(I sum) { return sum; }
// Each lane: sum += its two bfloat16 weights times its two activations.
inline F dot2(F sum, Bytes weights, Bytes x) { return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x); }

// As the one in context.h.
inline void transpose(const uint16_t* const* rows, int start, uint32_t* out, int stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + start);
  for (int i = 0; i < 16; i += 2) {  // 2 x 2 words within each 128 bits
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)  // 4 x 4
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)  // the 128 bits of 8 rows
    for (int j = 0; j < 4; ++j) {
      b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {  // and of 16
    const __m512i low = _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88), high = _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd);
    _mm512_storeu_si512(out + j * stride, low);
    _mm512_storeu_si512(out + (j + 8) * stride, high);
  }
}

}  // namespace specserve::SPECSERVE_ISA
