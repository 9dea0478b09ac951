// Says how likely tokens are under rows of scores, as kernels/_torch_sampling.py does: the same numbers bit for bit.
// Included once per instruction set.
#pragma once

#include <utility>

#include "args.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr double kRounder = 0x1.8p52;  // added to a number below 2^51 it leaves that, rounded to even, in the low bits
constexpr double kFarthest = -64.0;    // from the best: e^-64 is below any unit
constexpr int kExpsAtOnce = 256;

inline int64_t bits_of(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}

// e^x of a number from -64 to 0. Every operation is one that rounds alike everywhere.
inline double exp_below_zero(double x) {
  const double shifted = x * 0x1.71547652b82fep0 + kRounder;  // log2(e)
  const double power = shifted - kRounder;
  const double rest = (x - power * 0x1.62e42fee00000p-1) - power * 0x1.a39ef35793c76p-33;  // ln(2) in two parts
  double sum = 1.0 / 39916800;  // Taylor, one line for each step: compilers that keep a loop here vectorise nothing
  sum = sum * rest + 1.0 / 3628800;
  sum = sum * rest + 1.0 / 362880;
  sum = sum * rest + 1.0 / 40320;
  sum = sum * rest + 1.0 / 5040;
  sum = sum * rest + 1.0 / 720;
  sum = sum * rest + 1.0 / 120;
  sum = sum * rest + 1.0 / 24;
  sum = sum * rest + 1.0 / 6;
  sum = sum * rest + 0.5;
  sum = sum * rest + 1.0;
  sum = sum * rest + 1.0;
  const uint64_t exponent = (uint64_t(bits_of(shifted)) + 1023) << 52;
  double two_to_the_power;
  std::memcpy(&two_to_the_power, &exponent, 8);
  return sum * two_to_the_power;
}

// An integer sum has no order.
inline int64_t total_of(const float* x, int n, float peak, double unit) {
  uint64_t sum = 0;
  for (int first = 0; first < n; first += kExpsAtOnce) {
    const int size = std::min(kExpsAtOnce, n - first);
    double below[kExpsAtOnce];  // in a loop of its own: a constant inside the other becomes a branch of it
    for (int i = 0; i < size; ++i) {
      const double distance = double(x[first + i]) - double(peak);
      below[i] = distance > kFarthest ? distance : kFarthest;
    }
    for (int i = 0; i < size; ++i) sum += uint64_t(bits_of(exp_below_zero(below[i]) * unit + kRounder));
  }
  return int64_t(sum - uint64_t(n) * uint64_t(bits_of(kRounder)));
}

inline int num_above(const float* x, int n, float floor) {
  int count = 0;
  for (int i = 0; i < n; ++i) count += x[i] > floor;
  return count;
}

// The k best of those offered so far, in a heap whose root is the first to go: the lowest, of equals the highest token.
struct Best {
  float* scores;    // [k]
  int64_t* tokens;  // [k]
  int k, count = 0;

  bool goes_before(int a, int b) const {
    return scores[a] < scores[b] || (scores[a] == scores[b] && tokens[a] > tokens[b]);
  }

  void exchange(int a, int b) {
    std::swap(scores[a], scores[b]);
    std::swap(tokens[a], tokens[b]);
  }

  void sink(int at, int size) {
    for (int child; (child = 2 * at + 1) < size; at = child) {
      if (child + 1 < size && goes_before(child + 1, child)) ++child;
      if (!goes_before(child, at)) return;
      exchange(at, child);
    }
  }

  // Tokens are offered in ascending order.
  void offer(float score, int token) {
    if (count == k && !(score > scores[0])) return;
    const int at = count < k ? count++ : 0;
    scores[at] = score;
    tokens[at] = token;
    if (at) return rise(at);
    sink(0, count);
  }

  void rise(int at) {
    for (int parent; at && goes_before(at, parent = (at - 1) / 2); at = parent) exchange(at, parent);
  }

  void sort() {
    for (int size = count; size-- > 1;) {
      exchange(0, size);
      sink(0, size);
    }
  }
};

inline void take_best(const float* x, int n, Best best) {
  if (!best.k) return;
  int i = 0;
  for (; i < best.k; ++i) best.offer(x[i], i);
  constexpr int kAtOnce = 4 * kLanes;
  for (; i + kAtOnce <= n; i += kAtOnce) {
    const float* at = x + i;
    const F left = max(load(at), load(at + kLanes)), right = max(load(at + 2 * kLanes), load(at + 3 * kLanes));
    if (hmax(max(left, right)) > best.scores[0])
      for (int j = i; j < i + kAtOnce; ++j) best.offer(x[j], j);
  }
  for (; i < n; ++i) best.offer(x[i], i);
  best.sort();
}

inline void top_k(const TopKArgs& args, int begin, int end) {
  float scores[kMostTopK];
  int64_t tokens[kMostTopK];
  for (int row = begin; row < end; ++row) {
    std::fill_n(tokens, args.k, -1);
    if (args.best[row] >= 0) take_best(args.x + int64_t(row) * args.width, args.vocab, {scores, tokens, args.k});
    std::copy_n(tokens, args.k, args.tokens + int64_t(row) * args.k);
  }
}

inline void score(const ScoreArgs& args, int begin, int end) {
  for (int i = begin; i < end; ++i) {
    const float* x = args.scores + args.rows[i] * args.stride;
    const float own = x[args.tokens[i]], peak = peak_of(x, args.vocab);
    float* logits = args.logits + int64_t(i) * (1 + args.k);
    args.peak[i] = peak;
    logits[0] = own;
    if (!std::isfinite(peak)) continue;
    args.ranks[i] = 1 + num_above(x, args.vocab, own);
    args.total[i] = total_of(x, args.vocab, peak, args.unit);
    take_best(x, args.vocab, {logits + 1, args.best + int64_t(i) * args.k, args.k});
  }
}

}  // namespace specserve::SPECSERVE_ISA
