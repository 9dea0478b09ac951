// Draws tokens: temperature, min-p, top-k, top-p and Gumbel noise keyed by row and token, as sampling/filters.py and
// sampling/noise.py define them. Included once per instruction set.
#pragma once

#include <algorithm>

#include "args.h"
#include "order.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kNoiseAtOnce = 256;

// What one row's draw works on: the tokens that may come, in their order. `weights` are e^score relative to the best, 0
// for what is ruled out.
struct Race {
  const float* scores;    // [size]
  const int32_t* tokens;  // [size], or null where token i is i
  int size, best;
  double temperature;
  float* weights;     // [size, padded]
  float* candidates;  // [size]: scores, the first num_candidates of them
  int num_candidates;

  int token(int i) const { return tokens ? tokens[i] : i; }

  double shaped(float score) const { return (double(score) - double(scores[best])) / temperature; }
};

inline int first_best(const float* x, int n) {
  F peak = set(-INFINITY);
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) peak = max(load(x + i), peak);
  float top = hmax(peak);
  for (int i = whole; i < n; ++i) top = std::max(top, x[i]);
  return std::isfinite(top) ? first_equal(x, top) : -1;
}

inline void weigh_all(Race& race) {
  const int padded_size = int(padded(race.size));  // whole vectors, and whole eights for total_of
  for (int i = race.size; i < padded_size; ++i) race.weights[i] = -INFINITY;
  const double top = race.scores[race.best], inverse = 1.0 / race.temperature;
  for (int i = 0; i < race.size; ++i) race.weights[i] = float((double(race.scores[i]) - top) * inverse);
  race.weights[race.best] = 0.0f;  // 0 times infinity, where the temperature is next to nothing
  for (int i = 0; i < padded_size; i += kLanes) store(&race.weights[i], exp(load(&race.weights[i])));
}

inline void drop_below(Race& race, float floor) {
  for (int i = 0; i < race.size; ++i) race.weights[i] = race.scores[i] < floor ? 0.0f : race.weights[i];
}

// By eights of the vocabulary, so that tokens which may not come change no sum by their absence.
inline double total_of(const Race& race) {
  double sums[8] = {};
  if (race.tokens)
    for (int i = 0; i < race.size; ++i) sums[race.tokens[i] % 8] += race.weights[i];
  else
    for (int i = 0; i < race.size; i += 8)  // beyond it the weights are 0
      for (int j = 0; j < 8; ++j) sums[j] += race.weights[i + j];
  for (int n = 4; n; n /= 2)
    for (int j = 0; j < n; ++j) sums[j] += sums[j + n];
  return sums[0];
}

// The scores of what is left and lies within `reach` of the best, unordered.
inline void take_near(Race& race, float reach) {
  const float floor = race.scores[race.best] - reach;
  race.num_candidates = 0;
  for (int i = 0; i < race.size; ++i)
    if (race.scores[i] >= floor && race.weights[i] > 0) race.candidates[race.num_candidates++] = race.scores[i];
}

// Looks ever farther from the best until what it sees suffices: sorting a vocabulary takes longer than a step.
template <class Enough>
void take_enough(Race& race, Enough enough) {
  for (double reach = 4; reach <= 64; reach *= 2) {  // beyond 104 temperatures no weight is left
    take_near(race, float(reach * race.temperature));
    if (enough()) return;
  }
  take_near(race, INFINITY);
}

inline void keep_top_k(Race& race, int k) {
  if (k <= 0 || k >= race.size) return;
  take_enough(race, [&] { return race.num_candidates >= k; });
  if (race.num_candidates >= k) drop_below(race, nth_largest(race.candidates, race.num_candidates, k));
}

inline void keep_top_p(Race& race, double top_p) {
  if (top_p >= 1) return;
  const double enough = total_of(race) * top_p;
  const auto mass = [&] {
    double sum = 0;
    for (int i = 0; i < race.num_candidates; ++i) sum += std::exp(race.shaped(race.candidates[i]));
    return sum;
  };
  take_enough(race, [&] { return mass() >= enough; });
  sort_down(race.candidates, race.num_candidates);
  double above = 0;
  for (int i = 0; i < race.num_candidates; ++i) {
    above += std::exp(race.shaped(race.candidates[i]));
    if (above >= enough) return drop_below(race, race.candidates[i]);
  }
}

inline void keep_min_p(Race& race, double min_p) {
  if (min_p <= 0) return;
  const double floor = std::log(min_p);
  for (int i = 0; i < race.size; ++i)
    if (race.shaped(race.scores[i]) < floor) race.weights[i] = 0.0f;
}

inline uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

inline double finish_line(const Race& race, int i, uint64_t key, const int64_t* hashed) {
  const double u = (double(mix(key ^ uint64_t(hashed[race.token(i)])) >> 12) + 0.5) * 0x1p-52;
  return race.shaped(race.scores[i]) - std::log(-std::log(u));
}

// The token with the highest score plus noise. Since -log(u) >= 1 - u, a token can only beat `ahead` if 1 - u is below
// e^(score - ahead): most are out without a logarithm.
inline int run(const Race& race, uint64_t key, const int64_t* hashed) {
  int winner = race.best;
  double ahead = finish_line(race, winner, key, hashed);
  for (int first = 0; first < race.size; first += kNoiseAtOnce) {
    const int n = std::min(kNoiseAtOnce, race.size - first);
    const double reach = std::exp(-ahead) * (1 + 1e-5);  // weights are rounded
    int64_t gathered[kNoiseAtOnce];
    const int64_t* own = hashed + first;
    if (race.tokens) {
      for (int i = 0; i < n; ++i) gathered[i] = hashed[race.tokens[first + i]];
      own = gathered;
    }
    uint8_t near[kNoiseAtOnce] = {};
    for (int i = 0; i < n; ++i) {
      const uint64_t noise = mix(key ^ uint64_t(own[i])) >> 12;
      const double miss = (double(int64_t(0xFFFFFFFFFFFFF - noise)) + 0.5) * 0x1p-52;  // 1 - u
      near[i] = miss < double(race.weights[first + i]) * reach;
    }
    for (int i = 0; i < n; ++i) {
      if (!near[i]) continue;
      const double at = finish_line(race, first + i, key, hashed);
      if (at > ahead || (at == ahead && first + i < winner)) {
        ahead = at;
        winner = first + i;
      }
    }
  }
  return race.token(winner);
}

// The lowest of the best tokens whose bit is set, -1 where the best is not finite or there is none.
inline int best_within(const float* scores, int vocab, const int32_t* mask) {
  constexpr int kWidth = 32;
  static_assert(kWidth % kLanes == 0);
  const auto visit = [&](auto&& all, auto&& some) {  // `all` of 32 tokens, or `some` one; until either says true
    for (int first = 0; first < vocab; first += kWidth) {
      uint32_t word = uint32_t(mask[first / kWidth]);
      if (word == ~0u && vocab - first >= kWidth) {
        if (all(first)) return;
        continue;
      }
      for (; word; word &= word - 1) {
        const int token = first + __builtin_ctz(word);
        if (token >= vocab || some(token)) return;
      }
    }
  };
  F peak = set(-INFINITY);
  float top = -INFINITY;
  visit(
      [&](int first) {
        for (int i = 0; i < kWidth; i += kLanes) peak = max(load(scores + first + i), peak);
        return false;
      },
      [&](int token) {
        top = std::max(top, scores[token]);
        return false;
      });
  top = std::max(top, hmax(peak));
  if (!std::isfinite(top)) return -1;
  int best = -1;
  const auto is_best = [&](int token) { return scores[token] == top ? (best = token, true) : false; };
  visit(
      [&](int first) {
        for (int i = 0; i < kWidth; ++i)
          if (is_best(first + i)) return true;
        return false;
      },
      is_best);
  return best;
}

// Of one row the tokens whose bit is set, and their scores; returns how many they are.
inline int gather(const int32_t* mask, const float* scores, int vocab, float* kept, int32_t* tokens) {
  int count = 0;
  for (int first = 0; first < vocab; first += 32) {
    const int width = std::min(32, vocab - first);
    uint32_t word = uint32_t(mask[first / 32]);
    if (word == ~0u) {
      for (int i = 0; i < width; ++i) tokens[count + i] = first + i, kept[count + i] = scores[first + i];
      count += width;
      continue;
    }
    for (; word; word &= word - 1) {
      const int token = first + __builtin_ctz(word);
      if (token >= vocab) break;
      tokens[count] = token;
      kept[count++] = scores[token];
    }
  }
  return count;
}

// The row as it lies, or only what may come of it.
inline void enter(Race& race, const DrawArgs& args, int64_t row, const DrawScratch& scratch) {
  race.scores = args.scores + row * args.stride;
  race.tokens = nullptr;
  race.size = args.vocab;
  if (!args.masks) return;
  const int num_words = (args.vocab + 31) / 32;
  const int32_t* mask = args.masks + row * num_words;
  if (std::all_of(mask, mask + num_words, [](int32_t word) { return word == -1; })) return;
  race.size = gather(mask, race.scores, args.vocab, scratch.scores, scratch.tokens);
  race.scores = scratch.scores;
  race.tokens = scratch.tokens;
}

// A row without a finite best draws nothing, -1.
inline void draw(const DrawArgs& args, int begin, int end, const DrawScratch& scratch) {
  Race race;
  race.weights = scratch.weights;
  race.candidates = scratch.candidates;
  for (int i = begin; i < end; ++i) {
    enter(race, args, args.rows[i], scratch);
    race.best = first_best(race.scores, race.size);
    race.temperature = args.temperature[i];
    args.out[i] = -1;
    if (race.best < 0) continue;
    weigh_all(race);
    keep_min_p(race, args.min_p[i]);
    keep_top_k(race, args.top_k[i]);
    keep_top_p(race, args.top_p[i]);
    args.out[i] = run(race, uint64_t(args.keys[i]), args.hashed);
  }
}

}  // namespace specserve::SPECSERVE_ISA
