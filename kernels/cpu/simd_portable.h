// Vectors that are arrays: standard C++, for every other machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace specserve::SPECSERVE_ISA {

constexpr int kLanes = 16;
struct F {
  float v[kLanes];
};
struct I {
  int32_t v[kLanes];
};
struct Bytes {
  uint8_t v[4 * kLanes];
};
constexpr int kMaxRows = 2;
constexpr int kMaxIntRows = 2;
inline int most_int8_rows(int) { return kMaxIntRows; }
constexpr int kIntVectors = 2;
constexpr int kQueries = 2;
constexpr int kBfloat16Queries = 2;
constexpr int kHalfQueries = 2;

#define SPECSERVE_EACH(expression)                        \
  {                                                       \
    F r;                                                  \
    for (int i = 0; i < kLanes; ++i) r.v[i] = expression; \
    return r;                                             \
  }

inline F zero() SPECSERVE_EACH(0.0f)
inline F set(float x) SPECSERVE_EACH(x)
inline F load(const float* p) SPECSERVE_EACH(p[i])
inline void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
inline F add(F a, F b) SPECSERVE_EACH(a.v[i] + b.v[i])
inline F sub(F a, F b) SPECSERVE_EACH(a.v[i] - b.v[i])
inline F mul(F a, F b) SPECSERVE_EACH(a.v[i] * b.v[i])
inline F div(F a, F b) SPECSERVE_EACH(a.v[i] / b.v[i])
inline F fma(F a, F b, F c) SPECSERVE_EACH(a.v[i] * b.v[i] + c.v[i])
inline F max(F a, F b) SPECSERVE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i])
inline F min(F a, F b) SPECSERVE_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i])
inline F abs(F a) SPECSERVE_EACH(std::fabs(a.v[i]))
inline F to_float(I a) SPECSERVE_EACH(float(a.v[i]))
inline F scale_by_power(F a, F n) SPECSERVE_EACH(std::ldexp(a.v[i], int(n.v[i])))

template <class T, class V>
inline T halve(const V& x, T (*join)(T, T)) {
  T h[kLanes];
  for (int i = 0; i < kLanes; ++i) h[i] = x.v[i];
  for (int n = kLanes / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) h[i] = join(h[i], h[i + n]);
  return h[0];
}
inline float hmax(F a) {
  return halve<float>(a, [](float x, float y) { return x > y ? x : y; });
}
inline float hsum(F a) {
  return halve<float>(a, [](float x, float y) { return x + y; });
}
inline int32_t hsum(I a) {
  return halve<int32_t>(a, [](int32_t x, int32_t y) { return x + y; });
}
inline bool any_nan(F a) {
  bool found = false;
  for (float x : a.v) found |= std::isnan(x);
  return found;
}

inline I iset(int32_t x) {
  I r;
  for (int32_t& lane : r.v) lane = x;
  return r;
}
inline I iadd(I a, I b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] += b.v[i];
  return a;
}
inline I to_int(F a) {  // a number that does not fit becomes the smallest, as on x86
  I r;
  for (int i = 0; i < kLanes; ++i) {
    const float x = std::nearbyint(a.v[i]);
    r.v[i] = x >= -2147483648.0f && x < 2147483648.0f ? int32_t(x) : INT32_MIN;
  }
  return r;
}
inline void store_int8(int8_t* p, I a) {
  for (int i = 0; i < kLanes; ++i) p[i] = int8_t(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]);
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Moving the exponent by a product handles numbers below the normal range too.
  return from_bits(sign | magnitude << 13) * from_bits(0x77800000);
}
inline F load_half(const uint16_t* p) SPECSERVE_EACH(from_half(p[i]))
inline uint16_t to_half(float x) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x47800000) return sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00);
  if (magnitude < 0x38800000) return sign | uint16_t(std::nearbyint(std::fabs(x) * 16777216.0f));  // below the normal range
  return sign | uint16_t((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}
inline void store_half(uint16_t* p, F x) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_half(x.v[i]);
}
inline F load_bfloat(const uint16_t* p) SPECSERVE_EACH(from_bits(uint32_t(p[i]) << 16))
inline uint16_t to_bfloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void store_bfloat(uint16_t* p, F x) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat(x.v[i]);
}

inline Bytes load_bytes(const void* p) {
  Bytes r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline Bytes spread(const void* p) {
  Bytes r;
  for (int i = 0; i < kLanes; ++i) std::memcpy(r.v + 4 * i, p, 4);
  return r;
}
inline Bytes low_nibbles(Bytes a) {
  for (uint8_t& byte : a.v) byte &= 15;
  return a;
}
inline Bytes high_nibbles(Bytes a) {
  for (uint8_t& byte : a.v) byte >>= 4;
  return a;
}
inline F least_peak(F a) { return abs(a); }
inline I dot4(I sum, Bytes weights, Bytes x) {
  for (int i = 0; i < 4 * kLanes; ++i) sum.v[i / 4] += weights.v[i] * int8_t(x.v[i]);
  return sum;
}
inline I dot_nibbles(I sum, Bytes weights, Bytes x) { return dot4(sum, weights, x); }
inline I whole(I sum) { return sum; }
inline F dot2(F sum, Bytes weights, Bytes x) {
  uint32_t w[kLanes], y[kLanes];
  std::memcpy(w, weights.v, sizeof w);
  std::memcpy(y, x.v, sizeof w);
  for (int i = 0; i < kLanes; ++i) {
    sum.v[i] += from_bits(w[i] << 16) * from_bits(y[i] << 16);
    sum.v[i] += from_bits(w[i] & 0xffff0000) * from_bits(y[i] & 0xffff0000);
  }
  return sum;
}

}  // namespace specserve::SPECSERVE_ISA

#undef SPECSERVE_EACH
