// Distributions in float64, and what rejected drafts leave of them, as kernels/_torch_verify.py does. Included once per
// instruction set.
#pragma once

#include "args.h"
#include "sample.h"
#include "score.h"

namespace specserve::SPECSERVE_ISA {

// A sum of numbers that are not negative, of at most `most`, whose order does not matter: that of integers.
inline double fixed_total(const double* x, int n, double most) {
  const double unit = std::ldexp(1.0, 62 - int(std::ceil(std::log2(most))));
  int64_t sum = 0;
  for (int i = 0; i < n; ++i) sum += std::llrint(x[i] * unit);
  return double(sum) / unit;
}

// The distribution that row i, which has a token, is sampled from.
inline void probabilities(const SampleArgs& args, int i, const SampleScratch& scratch, double* p) {
  const float* scores = args.scores + args.rows[i] * args.stride;
  const Distribution own = distribution(args, i, scratch, scores, mask_of(args, i));
  const double top = own.scores[own.best];
  if (own.tokens) std::fill_n(p, args.vocab, 0.0);
  for (int first = 0; first < own.size; first += kExpsAtOnce) {
    const int n = std::min(kExpsAtOnce, own.size - first);
    double below[kExpsAtOnce], weights[kExpsAtOnce];
    for (int j = 0; j < n; ++j) below[j] = (double(own.scores[first + j]) - top) / own.temperature;
    // What is farther down is never drawn: no noise reaches so far.
    for (int j = 0; j < n; ++j) weights[j] = exp_below_zero(below[j] > kFarthest ? below[j] : kFarthest);
    for (int j = 0; j < n; ++j) weights[j] = below[j] > kFarthest && own.weights[first + j] > 0 ? weights[j] : 0.0;
    for (int j = 0; j < n; ++j) p[own.token(first + j)] = weights[j];
  }
  const double total = fixed_total(p, args.vocab, args.vocab);
  for (int j = 0; j < args.vocab; ++j) p[j] /= total;
}

inline double total(const double* x, int n) { return fixed_total(x, n, 2); }

// Makes of p what is left of weight * p once a token drawn from q / q_total (q null: this token alone) is rejected, and
// returns how much that was. Nothing left means that it could not fail (p = q): should rounding get here, p stays as it was.
inline double reject(double* p, int vocab, double weight, int token, const double* q, double q_total) {
  const auto left = [=](int i) {
    const double wanted = weight * p[i] - (q ? q[i] / q_total : 0.0);
    return wanted < 0 ? 0.0 : wanted;
  };
  const double unit = 0x1p61;  // for sums of at most 2
  int64_t sum = 0;
  for (int i = 0; i < vocab; ++i) sum += std::llrint(left(i) * unit);
  if (!q) sum -= std::llrint(left(token) * unit);
  const double total = double(sum) / unit;
  if (total == 0) return 0;
  for (int i = 0; i < vocab; ++i) p[i] = left(i) / total;
  if (!q) p[token] = 0;
  return total;
}

inline int sample_from(const double* p, int vocab, uint64_t key, const int64_t* hashed) {
  int best = 0;
  for (int i = 1; i < vocab; ++i) best = p[i] > p[best] ? i : best;
  const auto log_weight = [p](int i) { return std::log(p[i]); };
  return gumbel_max(p, nullptr, vocab, best, log_weight, key, hashed);
}

}  // namespace specserve::SPECSERVE_ISA
