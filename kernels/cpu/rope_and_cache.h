// What happens between the product that makes queries, keys and values and attention.
#pragma once

#include "args.h"
#include "context.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

// A head of d numbers, normed if it has a weight, into `out`.
inline void take_head(const float* x, const float* weight, float eps, int d, float* out) {
  float scale = 1.0f;
  if (weight) {
    float sum = 0;
    for (int i = 0; i < d; ++i) sum += x[i] * x[i];
    scale = 1.0f / std::sqrt(sum / float(d) + eps);
  }
  for (int i = 0; i < d; ++i) out[i] = weight ? x[i] * scale * weight[i] : x[i];
}

// Zeros for a head of which a number is not finite as the cache holds it: rounding to bfloat16 makes the largest floats
// infinite. Bits of numbers without their signs are in the numbers' order, infinity and NaN at the end.
inline void clear_broken(Cache cache, float* x, int d, std::atomic<bool>& broken) {
  uint32_t largest = 0;
  for (int i = 0; i < d; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  if (largest < (cache.number == Number::kBfloat16 ? 0x7f7f8000u : 0x7f800000u)) return;
  std::fill(x, x + d, 0.0f);
  broken.store(true, std::memory_order_relaxed);
}

// Item = row * heads of qkv + head. q is rotated into args.q, k rotated and v as it is into the cache. What is not finite
// is stored as zeros, and its row is broken: attention multiplies what a row does not see by 0, which would be NaN.
inline void rope_and_cache(const RopeAndCacheArgs& args, const int64_t* slots, std::atomic<bool>* broken, int begin, int end, float* scratch) {
  const int d = args.head_dim, half = d / 2, all = args.heads + 2 * args.kv_heads;
  float* turned = scratch + d;
  for (int item = begin; item < end; ++item) {
    const int row = item / all, head = item % all;
    const bool is_q = head < args.heads, is_v = head >= args.heads + args.kv_heads;
    take_head(args.qkv + int64_t(row) * args.stride + head * d, is_v ? nullptr : is_q ? args.q_norm : args.k_norm,
              args.eps, d, scratch);
    const int kv_head = head - args.heads - (is_v ? args.kv_heads : 0);
    if (is_v) {
      clear_broken(args.cache, scratch, d, broken[row]);
      store_value(args.cache, args.values, slots[row], args.kv_heads, kv_head, scratch, d);
      continue;
    }
    const float* cos = args.cos + args.positions[row] * d;
    const float* sin = args.sin + args.positions[row] * d;
    for (int i = 0; i < d; ++i) turned[i] = scratch[i] * cos[i] + scratch[i < half ? i + half : i - half] * sin[i];
    if (is_q) {
      std::memcpy(args.q + int64_t(row) * args.q_stride + head * d, turned, d * sizeof(float));
    } else {
      clear_broken(args.cache, turned, d, broken[row]);
      store_key(args.cache, args.keys, slots[row], args.kv_heads, kv_head, turned, d);
    }
  }
}

}  // namespace specserve::SPECSERVE_ISA
