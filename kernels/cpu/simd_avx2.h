// AVX2 with FMA and F16C.
#pragma once

#include "simd_256.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kMaxIntRows = 8;
// Four are quickest a row, five and six quicker together than apart: what they read comes from memory once.
inline int most_int8_rows(int rows) { return rows == 5 || rows == 6 ? rows : 4; }
constexpr int kIntVectors = 2;

// Here and now: else compilers keep what is added and add it later, for which there are too few registers.
inline I in_register(I sum) {
  asm("" : "+x"(sum));
  return sum;
}

// Products of bytes are added in pairs, in 16 bits, which hold 128 * 255. So neighbours of one sign may come to 127 together,
// which rounding makes 128 at most. With numbers up to 127 wherever they are the same takes half as long again: as 16-bit
// integers four operations for 32 products and not three; with signs moved to the weights (`vpsignb`) three for the two
// multipliers of a Zen and not two.
inline F least_peak(F a) { return max(abs(a), abs(add(a, _mm256_permute_ps(a, 0xb1)))); }
inline I dot4(I sum, Bytes weights, Bytes x) {
  return in_register(iadd(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(1))));
}
// In 16 bits, which hold a group's: 32 / 4 * 15 * 128 at most.
inline I dot_nibbles(I sum, Bytes weights, Bytes x) {
  return in_register(_mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x)));
}
inline I whole(I sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

}  // namespace specserve::SPECSERVE_ISA
