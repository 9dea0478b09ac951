// Attention of a few rows of one sequence, for the query heads that share one kv head, over the paged cache.
//
// The context is reduced in chunks of kChunk logical tokens with a running maximum (Milakov and Gimelshein, 2018). Chunks
// start at logical index 0 and hold the same numbers in the same order for a row of a chain, of a tree and of a prompt,
// and what a row does not see adds exact zeros: its bits are those of the row alone.
#pragma once

#include "args.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kSlice = 4;        // vectors of a head's numbers in registers
constexpr int kSubs = kChunk / kLanes;
constexpr int64_t kFetchedBytes = 1024;  // of the weights that follow, with every query of a chunk: memory rests meanwhile

// Views of one thread's scratch. Numbers are float32, or pairs of bfloat16 where the cache holds these.
struct Workspace {
  int queries, width;  // rows of q; head_dim, padded to a multiple of kLanes * 2
  float* q;            // [queries, width]
  float* keys;         // [width or width / 2, kChunk]
  float* values;       // [kChunk or kChunk / 2, width]
  float* scores;       // [queries, kChunk]
  float* sums;         // [queries, width]
  float* joined;       // [share * head_dim and a vector]: what one row's heads come to
  float *top, *total;  // [queries]
  int32_t* last;       // [queries]: the last logical index it sees
};

inline Workspace lay_out(void* scratch, int queries, int share, int head_dim) {
  Workspace w;
  w.queries = queries;
  w.width = int(padded(head_dim));
  float* next = (float*)scratch;
  const auto take = [&next](int64_t n) {
    float* p = next;
    next += (n + kLanes - 1) / kLanes * kLanes;
    return p;
  };
  w.q = take(int64_t(queries) * w.width);
  w.keys = take(int64_t(w.width) * kChunk);
  w.values = take(int64_t(w.width) * kChunk);
  w.scores = take(int64_t(queries) * kChunk);
  w.sums = take(int64_t(queries) * w.width);
  w.joined = take(int64_t(share) * head_dim + kLanes);
  w.top = take(queries);
  w.total = take(queries);
  w.last = (int32_t*)take(queries);
  return w;
}

inline void load_queries(const AttentionArgs& args, int first_row, int kv_head, const Workspace& w) {
  const int share = args.heads / args.kv_heads, d = args.head_dim;
  for (int i = 0; i < w.queries; ++i) {
    const float* q = args.q + int64_t(first_row + i / share) * args.q_stride + (kv_head * share + i % share) * d;
    float* to = w.q + int64_t(i) * w.width;
    std::fill(to, to + w.width, 0.0f);
    store_head(args.kv_is_bfloat16, to, 0, q, d);
    std::fill(w.sums + int64_t(i) * w.width, w.sums + int64_t(i + 1) * w.width, 0.0f);
    w.top[i] = -INFINITY;
    w.total[i] = 0.0f;
  }
}

// Keys and values of up to kChunk slots, zeros after them: keys by number, then token; values by token.
inline void gather_float32(const AttentionArgs& args, const int64_t* slots, int n, int kv_head, const Workspace& w) {
  const int d = args.head_dim;
  std::fill(w.keys, w.keys + w.width * kChunk, 0.0f);
  std::fill(w.values, w.values + w.width * kChunk, 0.0f);
  for (int t = 0; t < n; ++t) {
    const int64_t at = (slots[t] * args.kv_heads + kv_head) * d;
    for (int i = 0; i < d; ++i) w.keys[i * kChunk + t] = ((const float*)args.keys)[at + i];
    std::memcpy(w.values + int64_t(t) * w.width, (const float*)args.values + at, d * sizeof(float));
  }
}

// Pairs of numbers of a key, by pair, then token; pairs of tokens of the values, by pair, then number.
inline void gather_bfloat16(const AttentionArgs& args, const int64_t* slots, int n, int kv_head, const Workspace& w) {
  const int d = args.head_dim;
  uint32_t* keys = (uint32_t*)w.keys;
  uint32_t* values = (uint32_t*)w.values;
  static const uint16_t zeros[kMaxHead] = {};
  const uint16_t* tokens[kChunk];
  for (int t = 0; t < kChunk; ++t)
    tokens[t] = t < n ? (const uint16_t*)args.keys + (slots[t] * args.kv_heads + kv_head) * d : zeros;
  int pair = 0;
  for (; pair + kLanes <= d / 2; pair += kLanes)
    for (int t = 0; t < kChunk; t += kLanes) transpose(tokens + t, 2 * pair, keys + pair * kChunk + t, kChunk);
  for (; pair < w.width / 2; ++pair)
    for (int t = 0; t < kChunk; ++t) {
      const uint32_t low = 2 * pair < d ? tokens[t][2 * pair] : 0, high = 2 * pair + 1 < d ? tokens[t][2 * pair + 1] : 0;
      keys[pair * kChunk + t] = low | high << 16;
    }
  for (int t = 0; t < kChunk; t += 2) {
    const uint16_t* even = t < n ? (const uint16_t*)args.values + (slots[t] * args.kv_heads + kv_head) * d : zeros;
    const uint16_t* odd = t + 1 < n ? (const uint16_t*)args.values + (slots[t + 1] * args.kv_heads + kv_head) * d : zeros;
    uint32_t* to = values + int64_t(t / 2) * w.width;
    int i = 0;
    for (; i + 2 * kLanes <= d; i += 2 * kLanes) interleave(even + i, odd + i, to + i);
    for (; i < d; ++i) to[i] = uint32_t(even[i]) | uint32_t(odd[i]) << 16;
    std::fill(to + d, to + w.width, 0);
  }
}

// scores[q, t] = q . key t, for Q queries.
template <int Q, bool is_bfloat16>
void score(const Workspace& w, int first) {
  F sum[Q][kSubs];
  for (auto& s : sum)
    for (F& lane : s) lane = zero();
  const int steps = is_bfloat16 ? w.width / 2 : w.width;
  for (int i = 0; i < steps; ++i) {
    for (int s = 0; s < kSubs; ++s) {
      const float* key = w.keys + i * kChunk + s * kLanes;
      for (int q = 0; q < Q; ++q) {
        const float* at = w.q + int64_t(first + q) * w.width + i;
        sum[q][s] = is_bfloat16 ? dot2(sum[q][s], load_bytes(key), spread(at)) : fma(load(key), set(*at), sum[q][s]);
      }
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int s = 0; s < kSubs; ++s) store(w.scores + int64_t(first + q) * kChunk + s * kLanes, sum[q][s]);
}

// Scores into probabilities relative to the running maximum; sums are rescaled where that rises. False: nothing is seen.
inline bool soften(const Workspace& w, int query, int start, float scale, int window, bool is_bfloat16) {
  const int last = w.last[query], first = window ? last - window + 1 : 0;
  if (last < start || first >= start + kChunk) return false;
  float* scores = w.scores + int64_t(query) * kChunk;
  for (int t = 0; t < first - start; ++t) scores[t] = -INFINITY;
  for (int t = std::max(0, last + 1 - start); t < kChunk; ++t) scores[t] = -INFINITY;
  F p[kSubs];
  F peak = set(-INFINITY);
  for (int s = 0; s < kSubs; ++s) {
    p[s] = mul(load(scores + s * kLanes), set(scale));
    peak = max(peak, p[s]);
  }
  const float before = w.top[query], top = std::max(before, hmax(peak));
  F total = zero();
  for (int s = 0; s < kSubs; ++s) {
    p[s] = exp(sub(p[s], set(top)));
    total = add(total, p[s]);
    if (is_bfloat16)
      store_bfloat((uint16_t*)scores + s * kLanes, p[s]);
    else
      store(scores + s * kLanes, p[s]);
  }
  if (top != before) {
    const float shrink = before == -INFINITY ? 0.0f : std::exp(before - top);
    float* sums = w.sums + int64_t(query) * w.width;
    for (int i = 0; i < w.width; i += kLanes) store(sums + i, mul(load(sums + i), set(shrink)));
    w.total[query] *= shrink;
    w.top[query] = top;
  }
  w.total[query] += hsum(total);
  return true;
}

// sums[q] += probabilities . values, for Q queries and some vectors of numbers.
template <int Q, int vectors, bool is_bfloat16>
void weigh_vectors(const Workspace& w, const int* queries, int column) {
  constexpr int steps = is_bfloat16 ? kChunk / 2 : kChunk;
  F sum[Q][vectors];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < vectors; ++v) sum[q][v] = load(w.sums + int64_t(queries[q]) * w.width + column + v * kLanes);
  for (int t = 0; t < steps; ++t)
    for (int v = 0; v < vectors; ++v) {
      const float* value = w.values + int64_t(t) * w.width + column + v * kLanes;
      for (int q = 0; q < Q; ++q) {
        const float* p = w.scores + int64_t(queries[q]) * kChunk + t;
        sum[q][v] = is_bfloat16 ? dot2(sum[q][v], load_bytes(value), spread(p)) : fma(load(value), set(*p), sum[q][v]);
      }
    }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < vectors; ++v) store(w.sums + int64_t(queries[q]) * w.width + column + v * kLanes, sum[q][v]);
}

template <int Q, bool is_bfloat16>
void weigh(const Workspace& w, const int* queries, int column) {
  if ((w.width - column) / kLanes >= kSlice) return weigh_vectors<Q, kSlice, is_bfloat16>(w, queries, column);
  weigh_vectors<Q, kSlice / 2, is_bfloat16>(w, queries, column);
}

template <int Q = kQueries>
void score_some(const Workspace& w, int first, int n, bool is_bfloat16) {
  if constexpr (Q > 1)
    if (n < Q) return score_some<Q - 1>(w, first, n, is_bfloat16);
  is_bfloat16 ? score<Q, true>(w, first) : score<Q, false>(w, first);
}

template <int Q = kQueries>
void weigh_some(const Workspace& w, const int* queries, int n, int column, bool is_bfloat16) {
  if constexpr (Q > 1)
    if (n < Q) return weigh_some<Q - 1>(w, queries, n, column, is_bfloat16);
  is_bfloat16 ? weigh<Q, true>(w, queries, column) : weigh<Q, false>(w, queries, column);
}

// Queries [first, last) against the chunk that begins at logical index `start` and lies gathered in w.
inline void reduce(const AttentionArgs& args, const Workspace& w, int start, int first, int last, Ahead& ahead) {
  each_block(last - first, kQueries, [&](int from, int to) {
    score_some(w, first + from, to - from, args.kv_is_bfloat16);
    int seen[kQueries], n = 0;
    for (int q = first + from; q < first + to; ++q) {
      if (soften(w, q, start, args.scale, args.window, args.kv_is_bfloat16)) seen[n++] = q;
      fetch<false>(ahead, kFetchedBytes);
    }
    for (int column = 0; n && column < w.width; column += kSlice * kLanes)
      weigh_some(w, seen, n, column, args.kv_is_bfloat16);
  });
}

// use(slot, n): runs of n slots in a row, of logical tokens [begin, end). Blocks are walked, since a division for every
// token would take as long as the tokens' arithmetic.
template <class Use>
void each_run(const Span& span, int begin, int end, Use use) {
  if (begin >= end) return;
  int block = begin / span.block_size, offset = begin % span.block_size;
  for (int left = end - begin; left > 0; ++block, offset = 0) {
    const int n = std::min(left, span.block_size - offset);
    use(int64_t(span.blocks[block]) * span.block_size + offset, n);
    left -= n;
  }
}

inline int64_t* write_slots(const Span& span, int begin, int end, int64_t* slots) {
  each_run(span, begin, end, [&slots](int64_t slot, int n) {
    for (int i = 0; i < n; ++i) *slots++ = slot + i;
  });
  return slots;
}

// The chunk from `start` on as all rows of a chain see it, up to the last row.
inline int chain_slots(const Span& span, int start, int stop, int64_t* slots) {
  return int(write_slots(span, start, std::min(start + kChunk, stop), slots) - slots);
}

// The chunk as row r of a tree sees it: cached tokens, then its ancestors and itself as if they were a chain.
inline int tree_slots(const Span& span, int start, int r, int64_t* slots) {
  const int32_t* path = span.paths + span.path_starts[r];
  const int n = std::min(kChunk, span.cached + span.path_starts[r + 1] - span.path_starts[r] - start);
  int64_t* next = write_slots(span, start, std::min(start + n, span.cached), slots);
  for (int index = std::max(start, span.cached); index < start + n; ++index) {
    const int at = span.cached + path[index - span.cached];
    next = write_slots(span, at, at + 1, next);
  }
  return n;
}

inline void gather(const AttentionArgs& args, const int64_t* slots, int n, int kv_head, const Workspace& w) {
  args.kv_is_bfloat16 ? gather_bfloat16(args, slots, n, kv_head, w) : gather_float32(args, slots, n, kv_head, w);
}

// Asks for the KV of logical tokens [begin, end): they lie apart, and hardware does not foresee them.
inline void prefetch(const AttentionArgs& args, const Span& span, int begin, int end, int kv_head) {
  const int64_t bytes = args.head_dim * (args.kv_is_bfloat16 ? 2 : 4);
  each_run(span, begin, end, [&](int64_t slot, int n) {
    for (int64_t at = (slot * args.kv_heads + kv_head) * bytes; n > 0; --n, at += args.kv_heads * bytes)
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch((const char*)args.keys + at + i);
        __builtin_prefetch((const char*)args.values + at + i);
      }
  });
}

// Sums over totals, where the next linear layer reads them.
inline void finish(const AttentionArgs& args, const Workspace& w, int row, int kv_head) {
  const int d = args.head_dim, columns = args.heads / args.kv_heads * d;
  for (int q = 0; q < w.queries; ++row) {
    for (int column = 0; column < columns; column += d, ++q) {
      const F total = set(w.total[q]);
      for (int i = 0; i < d; i += kLanes)  // what is written beyond d is overwritten by the next
        store(w.joined + column + i, div(load(w.sums + int64_t(q) * w.width + i), total));
    }
    if (columns % kTile)
      std::memcpy((float*)args.out.data + int64_t(row) * args.out.width + kv_head * columns, w.joined, columns * sizeof(float));
    else
      for (int i = 0; i < columns; i += kTile) store_tile(args.out, row, kv_head * columns + i, w.joined + i);
  }
}

// Rows [begin, end) of one sequence, at most kRowBlock.
inline void attention(const AttentionArgs& args, const Span& span, int begin, int end, int kv_head, void* scratch, Ahead& ahead) {
  const int share = args.heads / args.kv_heads, rows = end - begin;
  const Workspace w = lay_out(scratch, rows * share, share, args.head_dim);
  load_queries(args, span.first + begin, kv_head, w);
  int first = INT32_MAX, stop = 0;
  for (int q = 0; q < w.queries; ++q) {
    const int r = begin + q / share;
    w.last[q] = span.cached + (span.paths ? span.path_starts[r + 1] - span.path_starts[r] - 1 : r);
    first = std::min(first, args.window ? w.last[q] - args.window + 1 : 0);
    stop = std::max(stop, w.last[q] + 1);
  }
  int64_t slots[kChunk];
  for (int start = std::max(first, 0) / kChunk * kChunk; start < stop; start += kChunk) {
    if (!span.paths || start + kChunk <= span.cached) {
      const int known = span.paths ? span.cached : stop;  // while this chunk is computed the next is on its way
      prefetch(args, span, start + kChunk, std::min(start + 2 * kChunk, known), kv_head);
      gather(args, slots, chain_slots(span, start, stop, slots), kv_head, w);
      reduce(args, w, start, 0, w.queries, ahead);
      continue;
    }
    for (int r = 0; r < rows; ++r) {
      const int n = tree_slots(span, start, begin + r, slots);
      if (n <= 0) continue;
      gather(args, slots, n, kv_head, w);
      reduce(args, w, start, r * share, (r + 1) * share, ahead);
    }
  }
  finish(args, w, span.first + begin, kv_head);
}

}  // namespace specserve::SPECSERVE_ISA
