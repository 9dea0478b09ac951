// Samples tokens: temperature, min-p, top-k, top-p and Gumbel noise keyed by row and token, as the reference in
// kernels/_torch_sampling.py does. Included once per instruction set.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>

#include "args.h"
#include "order.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kNoiseAtOnce = 256;
constexpr int kMaskWidth = 32;  // tokens of one word of a mask
constexpr int kNotFinite = -1, kNoTokenLeft = -2;  // as in specserve/ops: what stands in place of a token

// One row's distribution over the tokens that may come, in their order.
struct Distribution {
  const float* scores;    // [size]
  const int32_t* tokens;  // [size], or null where token i is i
  int size, best;
  double temperature;
  float* weights;     // [size, padded to vectors], e^score relative to the best; 0 for what is ruled out
  float* candidates;  // [size]: scores, the first num_candidates of them
  int num_candidates;

  int token(int i) const { return tokens ? tokens[i] : i; }

  double log_weight(float score) const { return (double(score) - double(scores[best])) / temperature; }
};

inline int no_token(float top) { return top == -INFINITY ? kNoTokenLeft : kNotFinite; }

// Where the highest of n scores is first, or why nowhere.
inline int first_best(const float* x, int n) {
  F peak = set(-INFINITY);
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) peak = max(load(x + i), peak);
  float top = hmax(peak);
  for (int i = whole; i < n; ++i) top = std::max(top, x[i]);
  return std::isfinite(top) ? first_equal(x, top) : no_token(top);
}

// Calls all(first) for every 32 tokens that may all come, some(token) for every other that may, until one says true.
template <class All, class Some>
void visit_allowed(const int32_t* mask, int vocab, All all, Some some) {
  for (int first = 0; first < vocab; first += kMaskWidth) {
    uint32_t word = uint32_t(mask[first / kMaskWidth]);
    if (word == ~0u && vocab - first >= kMaskWidth) {
      if (all(first)) return;
      continue;
    }
    for (; word; word &= word - 1) {
      const int token = first + __builtin_ctz(word);
      if (token >= vocab || some(token)) return;
    }
  }
}

// The lowest of the best tokens whose bit is set, or why there is none.
inline int masked_argmax(const float* scores, int vocab, const int32_t* mask) {
  static_assert(kMaskWidth % kLanes == 0);
  F peak = set(-INFINITY);
  float top = -INFINITY;
  visit_allowed(
      mask, vocab,
      [&](int first) {
        for (int i = 0; i < kMaskWidth; i += kLanes) peak = max(load(scores + first + i), peak);
        return false;
      },
      [&](int token) {
        top = std::max(top, scores[token]);
        return false;
      });
  top = std::max(top, hmax(peak));
  if (!std::isfinite(top)) return no_token(top);
  int best = -1;
  const auto is_best = [&](int token) { return scores[token] == top ? (best = token, true) : false; };
  visit_allowed(
      mask, vocab,
      [&](int first) {
        for (int i = 0; i < kMaskWidth; ++i)
          if (is_best(first + i)) return true;
        return false;
      },
      is_best);
  return best;
}

// Of one row the tokens whose bit is set, and their scores; returns how many they are.
inline int gather(const int32_t* mask, const float* scores, int vocab, float* kept, int32_t* tokens) {
  int count = 0;
  const auto keep = [&](int token) {
    tokens[count] = token;
    kept[count++] = scores[token];
    return false;
  };
  const auto keep_all = [&](int first) {
    for (int i = 0; i < kMaskWidth; ++i) tokens[count + i] = first + i, kept[count + i] = scores[first + i];
    count += kMaskWidth;
    return false;
  };
  visit_allowed(mask, vocab, keep_all, keep);
  return count;
}

inline void set_weights(Distribution& p) {
  const int padded_size = int(padded(p.size));  // whole vectors, and whole eights for total_of
  for (int i = p.size; i < padded_size; ++i) p.weights[i] = -INFINITY;
  const double top = p.scores[p.best], inverse = 1.0 / p.temperature;
  for (int i = 0; i < p.size; ++i) p.weights[i] = float((double(p.scores[i]) - top) * inverse);
  p.weights[p.best] = 0.0f;  // 0 times infinity, where the temperature is next to nothing
  for (int i = 0; i < padded_size; i += kLanes) store(&p.weights[i], exp(load(&p.weights[i])));
}

inline void drop_below(Distribution& p, float floor) {
  for (int i = 0; i < p.size; ++i) p.weights[i] = p.scores[i] < floor ? 0.0f : p.weights[i];
}

// By eights of the vocabulary, so that tokens which may not come change no sum by their absence.
inline double total_of(const Distribution& p) {
  double sums[8] = {};
  if (p.tokens)
    for (int i = 0; i < p.size; ++i) sums[p.tokens[i] % 8] += p.weights[i];
  else
    for (int i = 0; i < p.size; i += 8)  // beyond it the weights are 0
      for (int j = 0; j < 8; ++j) sums[j] += p.weights[i + j];
  for (int n = 4; n; n /= 2)
    for (int j = 0; j < n; ++j) sums[j] += sums[j + n];
  return sums[0];
}

// The scores of what is left and lies within `reach` of the best, unordered.
inline void take_near(Distribution& p, float reach) {
  const float floor = p.scores[p.best] - reach;
  p.num_candidates = 0;
  for (int i = 0; i < p.size; ++i)
    if (p.scores[i] >= floor && p.weights[i] > 0) p.candidates[p.num_candidates++] = p.scores[i];
}

// Looks ever farther from the best until what it sees suffices: sorting a vocabulary takes longer than a step.
template <class Enough>
void take_enough(Distribution& p, Enough enough) {
  for (double reach = 4; reach <= 64; reach *= 2) {  // beyond 104 temperatures no weight is left
    take_near(p, float(reach * p.temperature));
    if (enough()) return;
  }
  take_near(p, INFINITY);
}

inline void keep_top_k(Distribution& p, int k) {
  if (k <= 0 || k >= p.size) return;
  take_enough(p, [&] { return p.num_candidates >= k; });
  if (p.num_candidates >= k) drop_below(p, nth_largest(p.candidates, p.num_candidates, k));
}

inline void keep_top_p(Distribution& p, double top_p) {
  if (top_p >= 1) return;
  const double enough = total_of(p) * top_p;
  const auto mass = [&] {
    double sum = 0;
    for (int i = 0; i < p.num_candidates; ++i) sum += std::exp(p.log_weight(p.candidates[i]));
    return sum;
  };
  take_enough(p, [&] { return mass() >= enough; });
  sort_down(p.candidates, p.num_candidates);
  double above = 0;
  for (int i = 0; i < p.num_candidates; ++i) {
    above += std::exp(p.log_weight(p.candidates[i]));
    if (above >= enough) return drop_below(p, p.candidates[i]);
  }
}

inline void keep_min_p(Distribution& p, double min_p) {
  if (min_p <= 0) return;
  const double floor = std::log(min_p);
  for (int i = 0; i < p.size; ++i)
    if (p.log_weight(p.scores[i]) < floor) p.weights[i] = 0.0f;
}

inline uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

inline double unit(uint64_t key) { return (double(key >> 12) + 0.5) * 0x1p-52; }

inline double gumbel(uint64_t key) { return -std::log(-std::log(unit(key))); }

// -log(1 - miss) of a number in [0, 1), to 4 digits: shares rank drafts, and decide no token.
inline float wait_of(float miss) {
  const float near = miss * (1 + miss * (0.5f + miss * (0.33333333f + miss * (0.25f + miss * 0.2f))));
  const float u = std::max(1 - miss, 1e-30f);
  uint32_t bits;
  std::memcpy(&bits, &u, sizeof bits);
  const uint32_t mantissa = (bits & 0x7FFFFFu) | 0x3F800000u;
  float t;
  std::memcpy(&t, &mantissa, sizeof t);
  const bool is_high = t > 1.41421356f;
  t = is_high ? 0.5f * t : t;
  const float exponent = float(int(bits >> 23) - 127 + is_high);
  const float s = (t - 1) / (t + 1), q = s * s;
  const float log_t = 2 * s * (1 + q * (0.33333333f + q * (0.2f + q * (0.14285714f + q * 0.11111111f))));
  return miss < 0.06f ? near : -(exponent * 0.69314718f + log_t);
}

// What stands out of a row's entries, the first one first; -1 where there are no more.
template <int K>
struct Highest {
  int entries[K];
  double scores[K];
  double total;  // the sum of e^score over all entries, if it was asked for
};

// The K entries with the highest log-weight plus noise, of equals the first; `tokens` null where entry i is token i. Since
// -log(u) >= 1 - u, an entry can only beat a score if 1 - u is below e^(log-weight - score): most are out without a logarithm.
template <int K, bool kTotal, class Weight, class LogWeight>
inline Highest<K> gumbel_highest(const Weight* weights, const int32_t* tokens, int size, int best, LogWeight log_weight,
                                 uint64_t key, const int64_t* hashed) {
  const auto with_noise = [=](int i) {
    return log_weight(i) + gumbel(mix(key ^ uint64_t(hashed[tokens ? tokens[i] : i])));
  };
  Highest<K> found;
  std::fill_n(found.entries, K, -1);
  std::fill_n(found.scores, K, -INFINITY);
  found.entries[0] = best;
  found.scores[0] = with_noise(best);
  float sums[8] = {};
  for (int first = 0; first < size; first += kNoiseAtOnce) {
    const int n = std::min(kNoiseAtOnce, size - first);
    const double reach = std::exp(-found.scores[K - 1]) * (1 + 1e-5);  // weights are rounded
    int64_t gathered[kNoiseAtOnce];
    const int64_t* own = hashed + first;
    if (tokens) {
      for (int i = 0; i < n; ++i) gathered[i] = hashed[tokens[first + i]];
      own = gathered;
    }
    uint8_t near[kNoiseAtOnce] = {};
    float shares[kNoiseAtOnce];
    for (int i = 0; i < n; ++i) {
      const uint64_t noise = mix(key ^ uint64_t(own[i])) >> 12;
      const double miss = (double(int64_t(0xFFFFFFFFFFFFF - noise)) + 0.5) * 0x1p-52;  // 1 - u
      near[i] = miss < double(weights[first + i]) * reach;
      if constexpr (kTotal) shares[i] = float(miss);
    }
    if constexpr (kTotal) {
      std::fill(shares + n, shares + kNoiseAtOnce, 0.5f);
      for (int i = 0; i < kNoiseAtOnce; ++i) shares[i] = wait_of(shares[i]);
      for (int i = 0; i < n; ++i) sums[i % 8] += float(weights[first + i]) / shares[i];
    }
    for (int i = 0; i < n; ++i) {
      if (!near[i] || first + i == best) continue;
      const double at = with_noise(first + i);
      const auto is_above = [&](int k) {
        return at > found.scores[k] || (at == found.scores[k] && first + i < found.entries[k]);
      };
      int k = K;
      for (; k && is_above(k - 1); --k)
        if (k < K) found.entries[k] = found.entries[k - 1], found.scores[k] = found.scores[k - 1];
      if (k < K) found.entries[k] = first + i, found.scores[k] = at;
    }
  }
  found.total = std::accumulate(sums, sums + 8, 0.0);
  return found;
}

template <class Weight, class LogWeight>
inline int gumbel_max(const Weight* weights, const int32_t* tokens, int size, int best, LogWeight log_weight, uint64_t key,
                      const int64_t* hashed) {
  return gumbel_highest<1, false>(weights, tokens, size, best, log_weight, key, hashed).entries[0];
}

inline int gumbel_max(const Distribution& p, uint64_t key, const int64_t* hashed) {
  const auto log_weight = [p](int i) { return p.log_weight(p.scores[i]); };
  return p.token(gumbel_max(p.weights, p.tokens, p.size, p.best, log_weight, key, hashed));
}

// What row i is drawn from; its best is why there is none, where that is negative.
inline Distribution distribution(const SampleArgs& args, int i, const SampleScratch& scratch, const float* scores,
                                 const int32_t* mask) {
  Distribution p;
  p.scores = mask ? scratch.scores : scores;
  p.tokens = mask ? scratch.tokens : nullptr;
  p.size = mask ? gather(mask, scores, args.vocab, scratch.scores, scratch.tokens) : args.vocab;
  p.weights = scratch.weights;
  p.candidates = scratch.candidates;
  p.temperature = args.temperature[i];
  p.best = first_best(p.scores, p.size);
  if (p.best < 0) return p;
  set_weights(p);
  keep_min_p(p, args.min_p[i]);
  keep_top_k(p, args.top_k[i]);
  keep_top_p(p, args.top_p[i]);
  return p;
}

// Null where all tokens may come.
inline const int32_t* mask_of(const SampleArgs& args, int i) {
  const int num_words = (args.vocab + kMaskWidth - 1) / kMaskWidth;
  const int32_t* mask = args.masks ? args.masks + args.rows[i] * num_words : nullptr;
  const bool is_whole = mask && std::all_of(mask, mask + num_words, [](int32_t word) { return word == -1; });
  return is_whole ? nullptr : mask;
}

// The token of row i, or why it has none.
inline int sample(const SampleArgs& args, int i, const SampleScratch& scratch) {
  const float* scores = args.scores + args.rows[i] * args.stride;
  const int32_t* mask = mask_of(args, i);
  if (args.temperature[i] == 0) return mask ? masked_argmax(scores, args.vocab, mask) : first_best(scores, args.vocab);
  const Distribution p = distribution(args, i, scratch, scores, mask);
  return p.best < 0 ? p.best : gumbel_max(p, uint64_t(args.keys[i]), args.hashed);
}

// The two best entries of a row and the sum of all weights.
inline Highest<2> two_best(const Distribution& p) {
  Highest<2> found{{p.best, -1}, {0.0, -INFINITY}, total_of(p)};
  float top = -INFINITY;
  for (const auto [first, last] : {std::pair{0, p.best}, std::pair{p.best + 1, p.size}}) {
    if (first == last) continue;
    const float peak = peak_of(p.scores + first, last - first);
    if (peak > top) top = peak, found.entries[1] = first + first_equal(p.scores + first, peak);
  }
  found.scores[1] = p.log_weight(top);
  return found;
}

inline void draw(const DrawArgs& args, int begin, int end, float* scratch) {
  for (int i = begin; i < end; ++i) {
    const float* scores = args.logits + args.rows[i] * args.width;
    if (args.bias) {
      const float* bias = args.bias + int64_t(i) * args.bias_width;
      for (int j = 0; j < args.n; ++j) scratch[j] = scores[j] + bias[j];
      scores = scratch;
    }
    const double temperature = args.temperature[i];
    Distribution p{};
    p.scores = scores;
    p.size = args.n;
    p.weights = scratch + padded(args.n);
    p.temperature = temperature ? temperature : 1.0;
    const float top = peak_of(scores, args.n);
    p.best = std::isfinite(top) ? first_equal(scores, top) : -1;
    Highest<2> found{{-1, -1}, {}, 1.0};
    if (p.best >= 0) {
      set_weights(p);
      const auto log_weight = [p](int entry) { return p.log_weight(p.scores[entry]); };
      const uint64_t key = uint64_t(args.keys[i]);
      found = temperature ? gumbel_highest<2, true>(p.weights, nullptr, p.size, p.best, log_weight, key, args.hashed)
                          : two_best(p);
    }
    for (int k = 0; k < 2; ++k) {
      const int entry = std::max(found.entries[k], 0);
      const double share = found.entries[k] < 0 ? 0.0 : std::exp(found.scores[k]) / found.total;
      (k ? args.second : args.tokens)[i] = args.ids ? args.ids[entry] : entry;
      (k ? args.second_share : args.share)[i] = float(std::min(share, 1.0));
    }
  }
}

}  // namespace specserve::SPECSERVE_ISA
