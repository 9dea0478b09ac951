// AVX2 with FMA and F16C.
#pragma once

#include "simd_256.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kMaxIntRows = 8;
constexpr int kIntVectors = 2;

// Here and now: else compilers keep what is added and add it later, for which there are too few registers.
inline I in_register(I sum) {
  asm("" : "+x"(sum));
  return sum;
}

// Products of bytes are added in 16 bits, which do not hold two of 255 * 127: so int8 is multiplied as int16, numbers with
// even and with odd places apart, which takes no shuffle. Products of bytes with the sign moved to the activation
// (`vpsignb`, `vpmaddubsw`, `vpmaddwd`) are three operations for the two multipliers of a Zen, these are two.
struct Int8Weights {
  Bytes even, odd;
};
inline Int8Weights int8_weights(const void* p) {
  const Bytes stored = load_bytes(p);
  return {_mm256_and_si256(stored, _mm256_set1_epi16(255)), _mm256_srli_epi16(stored, 8)};
}
template <int R, class Rows>
class Int8Inputs : public Rows {
 public:
  explicit Int8Inputs(const Rows& rows) : Rows(rows) {
    for (int r = 0; r < R; ++r) {
      const Bytes x = load_bytes(rows.at(r));
      _mm256_store_si256(even_ + r, _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
      _mm256_store_si256(odd_ + r, _mm256_srai_epi16(x, 8));
      offsets_[r] = rows.offset(r);
      asm("" : "+m"(offsets_[r]));  // or a compiler gathers them in a vector first
    }
  }
  // As Quantized::anew.
  const Int8Inputs& anew() const {
    const Int8Inputs* same = this;
    asm("" : "+r"(same) : : "memory");
    return *same;
  }
  int32_t offset(int r) const { return offsets_[r]; }
  Int8Weights four(int r, int j) const { return {spread((const int32_t*)(even_ + r) + j), spread((const int32_t*)(odd_ + r) + j)}; }

 private:
  __m256i even_[R], odd_[R];
  int32_t offsets_[R];
};
inline I dot4(I sum, Int8Weights weights, Int8Weights x) {
  sum = in_register(iadd(sum, _mm256_madd_epi16(weights.even, x.even)));
  return in_register(iadd(sum, _mm256_madd_epi16(weights.odd, x.odd)));
}
// In 16 bits, which hold a group's: 32 / 4 * 2 * 15 * 127 at most.
inline I dot_nibbles(I sum, Bytes weights, Bytes x) {
  return in_register(_mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x)));
}
inline I whole(I sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

}  // namespace specserve::SPECSERVE_ISA
