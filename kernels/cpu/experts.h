// Where rows go in a mixture of experts, and the sums of what comes back.
#pragma once

#include "args.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

// Every expert is looked at once: it goes before those with a lower score. What is not a number goes before none.
inline void choose_experts(const RouteArgs& args, const float* scores, int32_t* chosen) {
  int count = 0;
  for (int expert = 0; expert < args.experts; ++expert) {
    if (count == args.top_k && !(scores[expert] > scores[chosen[count - 1]])) continue;
    count = std::min(count + 1, args.top_k);
    int at = count - 1;
    for (; at > 0 && scores[expert] > scores[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = expert;
  }
}

// e^(x - peak) of n numbers, in place, and their sum. There is room for padded(n).
inline float exps(float* x, int n, float peak) {
  std::fill(x + n, x + padded(n), -INFINITY);
  PartialSums sums;
  for (int i = 0; i < padded(n); i += kPartialSums)
    for (int v = 0; v < PartialSums::kVectors; ++v) {
      float* at = x + i + v * kLanes;
      const F some = exp(sub(load(at), set(peak)));
      store(at, some);
      sums.v[v] = add(sums.v[v], some);
    }
  return sums.total();
}

inline float sigmoid(float x) {
  float lanes[kLanes];
  store(lanes, div(set(1.0f), add(set(1.0f), exp(set(-x)))));
  return lanes[0];
}

inline void route(const RouteArgs& args, int begin, int end, float* scratch) {
  for (int row = begin; row < end; ++row) {
    const float* scores = args.scores + int64_t(row) * args.width;
    int32_t* chosen = args.chosen + int64_t(row) * args.top_k;
    choose_experts(args, scores, chosen);
    if (args.is_normalized)
      for (int i = 0; i < args.top_k; ++i) scratch[i] = scores[chosen[i]];
    else
      std::copy(scores, scores + args.experts, scratch);
    const float total = exps(scratch, args.is_normalized ? args.top_k : args.experts, scores[chosen[0]]);
    for (int i = 0; i < args.top_k; ++i)
      args.weights[int64_t(row) * args.top_k + i] = scratch[args.is_normalized ? i : chosen[i]] / total;
    if (args.share) args.share[row] = sigmoid(scores[args.experts]);
  }
}

inline void combine(const CombineArgs& args, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const int32_t* pairs = args.pairs + int64_t(row) * args.top_k;
    const float* weights = args.weights + int64_t(row) * args.top_k;
    const int64_t at = int64_t(row) * args.width;
    for (int i = 0; i < args.width; i += kLanes) {
      F sum = zero();
      for (int j = 0; j < args.top_k; ++j) sum = fma(load(args.x + int64_t(pairs[j]) * args.width + i), set(weights[j]), sum);
      if (args.shared) sum = fma(load(args.shared + at + i), set(args.share ? args.share[row] : 1.0f), sum);
      store(args.out + at + i, sum);
    }
  }
}

}  // namespace specserve::SPECSERVE_ISA
