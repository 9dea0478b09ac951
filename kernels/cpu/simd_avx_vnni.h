// AVX2 with FMA, F16C and AVX-VNNI: vectors of 256 bits on processors without AVX-512.
#pragma once

#include "simd_256.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kMaxIntRows = 6;
inline int most_int8_rows(int) { return kMaxIntRows; }
constexpr int kIntVectors = 2;

inline I dot_bytes(I sum, Bytes weights, Bytes x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, weights, x);
#else  // the same instruction as AVX-512 encodes it: see simd_avx_vnni_evex.h
  return _mm256_dpbusd_epi32(sum, weights, x);
#endif
}
inline F least_peak(F a) { return abs(a); }
inline I dot4(I sum, Bytes weights, Bytes x) { return dot_bytes(sum, weights, x); }
inline I dot_nibbles(I sum, Bytes weights, Bytes x) { return dot_bytes(sum, weights, x); }
inline I whole(I sum) { return sum; }

}  // namespace specserve::SPECSERVE_ISA
