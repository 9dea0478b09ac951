// What happens to rows one by one: embedding, norms, quantized activations.
#pragma once

#include <algorithm>
#include <cmath>

#include "args.h"

namespace specserve::SPECSERVE_ISA {

static_assert(kTile % kLanes == 0 && kGroup % kLanes == 0 && kSlotGroup % kLanes == 0 && kPartialSums % kLanes == 0,
              "tiles, groups and partial sums are whole vectors");

// Partial sums of a row's numbers, whatever the width of a vector: number i belongs to i % kPartialSums.
struct PartialSums {
  static constexpr int kVectors = kPartialSums / kLanes;
  F v[kVectors];

  PartialSums() {
    for (F& some : v) some = zero();
  }
  float total() const {
    PartialSums left = *this;
    for (int n = kVectors / 2; n; n /= 2)
      for (int i = 0; i < n; ++i) left.v[i] = add(left.v[i], left.v[i + n]);
    return hsum(left.v[0]);
  }
};

// e^x to within 2 units in the last place, exactly 1 at 0 and 0 far below: powers of two times a Taylor polynomial of the
// rest, which is at most ln(2) / 2.
inline F exp(F x) {
  const F bounded = min(set(89.0f), max(set(-150.0f), x));  // in this order a NaN stays one
  const F power = to_float(to_int(mul(bounded, set(1.44269504f))));
  F rest = fma(power, set(-0.693359375f), bounded);
  rest = fma(power, set(2.12194440e-4f), rest);
  F sum = set(1.0f / 5040);
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = fma(sum, rest, set(term));
  return scale_by_power(sum, power);
}

// 2^x for x up to 0, to within 2 units in the last place, exactly 1 at 0 and 0 far below: a polynomial whose relative error
// on [-1/2, 1/2] is at most 1e-7.
inline F exp2_of_negative(F x) {
  const F bounded = max(set(-150.0f), x);
  const F power = to_float(to_int(bounded)), rest = sub(bounded, power);
  F sum = set(0.001326472731f);
  for (float factor : {0.009671512991f, 0.055507335812f, 0.240222424269f, 0.693147003651f, 1.0f}) sum = fma(sum, rest, set(factor));
  return scale_by_power(sum, power);
}

inline F silu(F x) { return div(x, add(set(1.0f), exp(sub(zero(), x)))); }

// x (1 + tanh(y)) / 2 = x / (1 + e^(-2y)).
inline F gelu_tanh(F x) {
  const F cube = mul(mul(x, x), mul(x, set(0.044715f)));
  return div(x, add(set(1.0f), exp(mul(add(x, cube), set(-2 * 0.7978845608f)))));
}

// 1 - erf(z) for z from 0 on, to within 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
inline F erfc(F z) {
  const F t = div(set(1.0f), fma(z, set(0.3275911f), set(1.0f)));
  F sum = set(1.061405429f);
  for (float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = fma(sum, t, set(factor));
  return mul(mul(sum, t), exp(sub(zero(), mul(z, z))));
}

inline F relu(F x) { return max(zero(), x); }  // in this order a NaN stays one

// x (1 + erf(x / sqrt(2))) / 2.
inline F gelu(F x) {
  const F size = abs(x);
  return sub(relu(x), mul(mul(size, set(0.5f)), erfc(mul(size, set(0.70710678f)))));
}

inline F activate(Nonlinear activation, F x) {
  switch (activation) {
    case Nonlinear::kSilu: return silu(x);
    case Nonlinear::kGeluTanh: return gelu_tanh(x);
    case Nonlinear::kRelu: return relu(x);
    case Nonlinear::kGelu: return gelu(x);
  }
  return x;
}

// Blocks [first, last) of n rows, at most so many that they fit the registers and as even as can be: 9 are 5 and 4.
template <class Use>
void each_block(int n, int most, Use use) {
  const int blocks = (n + most - 1) / most;
  for (int b = 0; b < blocks; ++b) use(n * b / blocks, n * (b + 1) / blocks);
}

// Asks for so many bytes more: into the innermost cache, or, where other things are in use meanwhile, the one behind it.
template <bool is_inner = true>
inline void fetch(Ahead& ahead, int64_t bytes) {
  if (ahead.at >= ahead.end) return;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead.at + i, 0, is_inner ? 3 : 2);
  ahead.at += bytes;
  if (ahead.at < ahead.end || ahead.next == ahead.last) return;
  ahead.at = ahead.next->begin;
  ahead.end = ahead.next++->end;
}

constexpr float kNothing = 1e-30f;  // what is smaller is quantized to 0: its inverse might be infinite

inline float mean_square(const float* x, int width, int n) {
  PartialSums sums;
  for (int i = 0; i < width; i += kPartialSums)
    for (int v = 0; v < PartialSums::kVectors; ++v) {
      const F some = load(x + i + v * kLanes);
      sums.v[v] = fma(some, some, sums.v[v]);
    }
  return sums.total() / float(n);
}

// `out` may be x. Both have zeros from n to width, and norms too.
inline void normed(const float* x, const Norm& norm, float eps, int n, int width, float* out) {
  if (norm.subtracts_mean) {
    PartialSums sums;
    for (int i = 0; i < width; i += kPartialSums)
      for (int v = 0; v < PartialSums::kVectors; ++v) sums.v[v] = add(sums.v[v], load(x + i + v * kLanes));
    const F mean = set(sums.total() / float(n));
    for (int i = 0; i < width; i += kLanes) store(out + i, sub(load(x + i), mean));
    std::fill(out + n, out + width, 0.0f);
    x = out;
  }
  const F scale = set(1.0f / std::sqrt(mean_square(x, width, n) + eps));
  for (int i = 0; i < width; i += kLanes) {
    const F y = mul(mul(load(x + i), scale), load(norm.weight + i));
    store(out + i, norm.bias ? add(y, load(norm.bias + i)) : y);
  }
}

// Symmetric integers of at most 127 for one group. What is not finite makes the scale NaN: it must not vanish.
inline void quantize_group(const float* x, int8_t* out, float* scale, int32_t* sum) {
  constexpr int kVectors = kGroup / kLanes;
  F all[kVectors], largest = zero();
  bool is_nan = false;
  for (int v = 0; v < kVectors; ++v) {
    all[v] = load(x + v * kLanes);
    is_nan |= any_nan(all[v]);
    largest = max(largest, least_peak(all[v]));
  }
  const float peak = hmax(largest);
  if (is_nan || !std::isfinite(peak)) {
    std::memset(out, 0, kGroup);
    *sum = 0;
    *scale = NAN;
    return;
  }
  const F inverse = set(peak > kNothing ? 127.0f / peak : 0.0f);
  I total = iset(0);
  for (int v = 0; v < kVectors; ++v) {
    const I n = to_int(mul(all[v], inverse));
    store_int8(out + v * kLanes, n);
    total = iadd(total, n);
  }
  *sum = hsum(total);
  *scale = peak / 127.0f;
}

// Store kTile columns of one row as its linear layer reads them.
inline void store_tile(const Activation& out, int row, int column, const float* x) {
  const int64_t at = int64_t(row) * out.width + column;
  if (out.kind == Kind::kInt8) {
    const int64_t group = at / kGroup;
    quantize_group(x, (int8_t*)out.data + at, out.scales + group, out.sums + group);
  } else if (out.kind == Kind::kBfloat16) {
    for (int i = 0; i < kTile; i += kLanes) store_bfloat((uint16_t*)out.data + at + i, load(x + i));
  } else {
    for (int i = 0; i < kTile; i += kLanes) store((float*)out.data + at + i, load(x + i));
  }
}

inline void quantize_activation(const QuantizeActivationArgs& args, int begin, int end) {
  for (int row = begin; row < end; ++row)
    for (int i = 0; i < args.width; i += kTile) store_tile(args.out, row, i, args.x + int64_t(row) * args.width + i);
}

inline float number_at(const void* table, bool is_bfloat16, int64_t i) {
  if (!is_bfloat16) return ((const float*)table)[i];
  const uint32_t bits = uint32_t(((const uint16_t*)table)[i]) << 16;
  float widened;
  std::memcpy(&widened, &bits, 4);
  return widened;
}

inline void embed(const EmbedArgs& args, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const int64_t from = args.ids[row] * args.hidden;
    float* out = args.out + int64_t(row) * args.width;
    for (int i = 0; i < args.hidden; ++i) out[i] = number_at(args.table, args.is_bfloat16, from + i) * args.scale;
    std::fill(out + args.hidden, out + args.width, 0.0f);
    if (args.positions) {
      const int64_t place = args.positions[row] * args.hidden;
      for (int i = 0; i < args.hidden; ++i) out[i] += number_at(args.position_table, args.is_bfloat16, place + i);
    }
    if (args.norm.weight) normed(out, args.norm, args.eps, args.hidden, args.width, out);
  }
}

// x = residual + delta, where delta is normed first if there is a weight for it.
inline void add_delta(const float* residual, const float* delta, const float* post, float eps, int n, int width, float* x) {
  if (!delta) {
    if (x != residual) std::memcpy(x, residual, width * sizeof(float));
    return;
  }
  const F scale = set(post ? 1.0f / std::sqrt(mean_square(delta, width, n) + eps) : 1.0f);
  for (int i = 0; i < width; i += kLanes) {
    const F d = post ? mul(mul(load(delta + i), scale), load(post + i)) : load(delta + i);
    store(x + i, add(load(residual + i), d));
  }
}

inline void fused_add_norm(const FusedAddNormArgs& args, int begin, int end, float* scratch) {
  for (int row = begin; row < end; ++row) {
    float* residual = args.residual + int64_t(row) * args.width;
    const float* delta = args.delta ? args.delta + int64_t(row) * args.width : nullptr;
    add_delta(residual, delta, args.post_weight, args.eps, args.hidden, args.width, residual);
    if (args.norm.weight) normed(residual, args.norm, args.eps, args.hidden, args.width, scratch);
    const float* x = args.norm.weight ? scratch : residual;
    for (int i = 0; i < args.width; i += kTile) store_tile(args.out, row, i, x + i);
  }
}

inline void joined_norms(const JoinedNormsArgs& args, int begin, int end, float* scratch) {
  for (int row = begin; row < end; ++row) {
    float* to = scratch;
    for (const auto& part : args.parts) {
      const float* x = part.x + int64_t(row) * part.width;
      const F scale = set(part.weight ? 1.0f / std::sqrt(mean_square(x, part.width, part.n) + args.eps) : 1.0f);
      for (int i = 0; i < part.n; i += kLanes)  // what is written beyond n is overwritten by the next
        store(to + i, part.weight ? mul(mul(load(x + i), scale), load(part.weight + i)) : load(x + i));
      to += part.n;
    }
    std::fill(to, scratch + args.out.width, 0.0f);
    for (int i = 0; i < args.out.width; i += kTile) store_tile(args.out, row, i, scratch + i);
  }
}

inline void norm_projections(const NormProjectionsArgs& args, int begin, int end, float* scratch) {
  const auto norm = [&](float* x, int n, const float* weight) {
    const int width = int(padded(n));
    std::memcpy(scratch, x, n * sizeof(float));
    std::fill(scratch + n, scratch + width, 0.0f);
    normed(scratch, {weight, nullptr, false}, args.eps, n, width, scratch);
    std::memcpy(x, scratch, n * sizeof(float));
  };
  for (int row = begin; row < end; ++row) {
    float* x = args.x + int64_t(row) * args.stride;
    norm(x, args.q, args.q_norm);
    norm(x + args.q, args.k, args.k_norm);
  }
}

inline void gather_rows(const GatherRowsArgs& args, int begin, int end) {
  for (int i = begin; i < end; ++i) {
    const int64_t from = args.rows[i] * args.width;
    const float* delta = args.delta ? args.delta + from : nullptr;
    float* out = args.out + int64_t(i) * args.width;
    add_delta(args.residual + from, delta, args.post_weight, args.eps, args.hidden, args.width, out);
  }
}

inline void softcap(float* x, int width, float cap, int begin, int end) {
  for (int64_t i = int64_t(begin) * width; i < int64_t(end) * width; i += kLanes) {
    // cap * tanh(x / cap), with tanh(y) = 1 - 2 / (1 + e^(2y)).
    const F grown = exp(mul(load(x + i), set(2.0f / cap)));
    store(x + i, mul(set(cap), sub(set(1.0f), div(set(2.0f), add(set(1.0f), grown)))));
  }
}

inline int first_equal(const float* x, float value) {
  int i = 0;
  while (x[i] != value) ++i;
  return i;
}

// The highest of n numbers, NaN if any is not a number.
inline float peak_of(const float* x, int n) {
  F lanes = set(-INFINITY);
  bool has_nan = false;
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    const F some = load(x + i);
    has_nan |= any_nan(some);
    lanes = max(lanes, some);
  }
  float peak = hmax(lanes);
  for (int i = whole; i < n; ++i) {
    has_nan |= std::isnan(x[i]);
    peak = std::max(peak, x[i]);
  }
  return has_nan ? NAN : peak;
}

// The lowest index of the highest of n numbers of each row, -1 if that is infinite or any is not a number.
inline void argmax(const float* x, int width, int n, int64_t* best, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const float* at = x + int64_t(row) * width;
    const float peak = peak_of(at, n);
    best[row] = std::isfinite(peak) ? first_equal(at, peak) : -1;
  }
}

constexpr float kLargestHalf = 65504.0f;

// A head of d numbers as a cache of such numbers holds it. float16 holds the largest that it has of what is larger.
inline void store_head(Number number, void* to, const float* x, int d) {
  if (number == Number::kFloat32) {
    std::memcpy(to, x, d * sizeof(float));
    return;
  }
  const auto round = [number](uint16_t* rounded, const float* some) {
    if (number == Number::kBfloat16) return store_bfloat(rounded, load(some));
    store_half(rounded, min(set(kLargestHalf), max(set(-kLargestHalf), load(some))));
  };
  int i = 0;
  for (; i + kLanes <= d; i += kLanes) round((uint16_t*)to + i, x + i);
  if (i == d) return;
  float rest[kLanes] = {};
  uint16_t rounded[kLanes];
  std::memcpy(rest, x + i, (d - i) * sizeof(float));
  round(rounded, rest);
  std::memcpy((uint16_t*)to + i, rounded, (d - i) * sizeof(uint16_t));
}

}  // namespace specserve::SPECSERVE_ISA
