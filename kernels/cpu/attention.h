// Attention of a few rows of one sequence, for the query heads that share one kv head, over the paged cache.
//
// The context is reduced in chunks of kChunk logical tokens with a running maximum (Milakov and Gimelshein, 2018). Chunks
// start at logical index 0 and hold the same numbers in the same order for a row of a chain, of a tree and of a prompt,
// and what a row does not see adds exact zeros: its bits are those of the row alone.
#pragma once

#include "args.h"
#include "context.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kChunkVectors = kChunk / kLanes;
constexpr int kAtOnce = 4;         // of these, summed at a time
constexpr int kSlice = std::max(4 * kLanes, kTile);  // of a head's numbers, summed at a time: registers hold no more
static_assert(kChunk % kPartialSums == 0 && kChunkVectors % kAtOnce == 0 && kBfloat16Queries <= kQueries);
constexpr int64_t kFetchedBytes = 1024;  // of the weights that follow, with every query of a chunk: memory rests meanwhile

inline void load_queries(const AttentionArgs& args, int first_row, int kv_head, const Workspace& w) {
  const int share = args.heads / args.kv_heads, d = args.head_dim;
  for (int i = 0; i < w.queries; ++i) {
    const float* q = args.q + int64_t(first_row + i / share) * args.q_stride + (kv_head * share + i % share) * d;
    float* to = w.q + int64_t(i) * w.width;
    std::fill(to, to + w.width, 0.0f);
    store_head(args.cache != Cache::kFloat32, to, 0, q, d);
    std::fill(w.sums + int64_t(i) * w.width, w.sums + int64_t(i + 1) * w.width, 0.0f);
    w.top[i] = -INFINITY;
    w.total[i] = 0.0f;
  }
}

// scores[q, t] = q . key t, for Q queries.
template <int Q, bool is_bfloat16>
void score(const Context& c, const Workspace& w, int first) {
  const int steps = is_bfloat16 ? w.width / 2 : w.width;
  for (int begin = 0; begin < kChunkVectors; begin += kAtOnce) {
    const float* keys[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      const int token = (begin + v) * kLanes;
      keys[v] = c.keys[token / kSlotGroup] + token % kSlotGroup;
    }
    F sum[Q][kAtOnce];
    for (auto& s : sum)
      for (F& lane : s) lane = zero();
    for (int i = 0; i < steps; ++i)
      for (int v = 0; v < kAtOnce; ++v) {
        const float* key = keys[v] + i * kSlotGroup;
        for (int q = 0; q < Q; ++q) {
          const float* at = w.q + int64_t(first + q) * w.width + i;
          sum[q][v] = is_bfloat16 ? dot2(sum[q][v], load_bytes(key), spread(at)) : fma(load(key), set(*at), sum[q][v]);
        }
      }
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < kAtOnce; ++v) store(w.scores + int64_t(first + q) * kChunk + (begin + v) * kLanes, sum[q][v]);
  }
}

// Scores into probabilities relative to the running maximum; sums are rescaled where that rises. False: nothing is seen.
inline bool softmax_chunk(const Workspace& w, int query, int start, float scale, int window, bool is_bfloat16) {
  const int last = w.last[query], first = window ? last - window + 1 : 0;
  if (last < start || first >= start + kChunk) return false;
  float* scores = w.scores + int64_t(query) * kChunk;
  for (int t = 0; t < first - start; ++t) scores[t] = -INFINITY;
  for (int t = std::max(0, last + 1 - start); t < kChunk; ++t) scores[t] = -INFINITY;
  F p[kChunkVectors];
  F peak = set(-INFINITY);
  for (int v = 0; v < kChunkVectors; ++v) {
    p[v] = mul(load(scores + v * kLanes), set(scale));
    peak = max(peak, p[v]);
  }
  const float before = w.top[query], top = std::max(before, hmax(peak));
  PartialSums sums;
  for (int v = 0; v < kChunkVectors; ++v) {
    p[v] = exp(sub(p[v], set(top)));
    F& sum = sums.v[v % PartialSums::kVectors];
    sum = add(sum, p[v]);
    if (is_bfloat16)
      store_bfloat((uint16_t*)scores + v * kLanes, p[v]);
    else
      store(scores + v * kLanes, p[v]);
  }
  if (top != before) {
    const float shrink = before == -INFINITY ? 0.0f : std::exp(before - top);
    float* values = w.sums + int64_t(query) * w.width;
    for (int i = 0; i < w.width; i += kLanes) store(values + i, mul(load(values + i), set(shrink)));
    w.total[query] *= shrink;
    w.top[query] = top;
  }
  w.total[query] += sums.total();
  return true;
}

// sums[q] += probabilities . values, for Q queries and some vectors of numbers.
template <int Q, int vectors, bool is_bfloat16>
void weigh_vectors(const Context& c, const Workspace& w, const int* queries, int column) {
  constexpr int steps = is_bfloat16 ? kSlotGroup / 2 : kSlotGroup;
  F sum[Q][vectors];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < vectors; ++v) sum[q][v] = load(w.sums + int64_t(queries[q]) * w.width + column + v * kLanes);
  for (int g = 0; g < kGroups; ++g)
    for (int t = 0; t < steps; ++t)
      for (int v = 0; v < vectors; ++v) {
        const float* value = c.values[g] + t * w.width + column + v * kLanes;
        for (int q = 0; q < Q; ++q) {
          const float* p = w.scores + int64_t(queries[q]) * kChunk + g * steps + t;
          sum[q][v] = is_bfloat16 ? dot2(sum[q][v], load_bytes(value), spread(p)) : fma(load(value), set(*p), sum[q][v]);
        }
      }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < vectors; ++v) store(w.sums + int64_t(queries[q]) * w.width + column + v * kLanes, sum[q][v]);
}

template <int Q, bool is_bfloat16>
void weigh(const Context& c, const Workspace& w, const int* queries, int column) {
  if (w.width - column >= kSlice) return weigh_vectors<Q, kSlice / kLanes, is_bfloat16>(c, w, queries, column);
  weigh_vectors<Q, kTile / kLanes, is_bfloat16>(c, w, queries, column);
}

template <int Q = kQueries>
void score_some(const Context& c, const Workspace& w, int first, int n, bool is_bfloat16) {
  if constexpr (Q > 1)
    if (n < Q) return score_some<Q - 1>(c, w, first, n, is_bfloat16);
  is_bfloat16 ? score<Q, true>(c, w, first) : score<Q, false>(c, w, first);
}

template <int Q = kQueries>
void weigh_some(const Context& c, const Workspace& w, const int* queries, int n, int column, bool is_bfloat16) {
  if constexpr (Q > 1)
    if (n < Q) return weigh_some<Q - 1>(c, w, queries, n, column, is_bfloat16);
  is_bfloat16 ? weigh<Q, true>(c, w, queries, column) : weigh<Q, false>(c, w, queries, column);
}

// Queries [first, last) against the chunk that begins at logical index `start`.
inline void reduce(const AttentionArgs& args, const Context& c, const Workspace& w, int start, int first, int last, Ahead& ahead) {
  const bool is_bfloat16 = args.cache != Cache::kFloat32;
  each_block(last - first, is_bfloat16 ? kBfloat16Queries : kQueries, [&](int from, int to) {
    score_some(c, w, first + from, to - from, is_bfloat16);
    int seen[kQueries], n = 0;
    for (int q = first + from; q < first + to; ++q) {
      if (softmax_chunk(w, q, start, args.scale, args.window, is_bfloat16)) seen[n++] = q;
      fetch<false>(ahead, kFetchedBytes);
    }
    for (int column = 0; n && column < w.width; column += kSlice)
      weigh_some(c, w, seen, n, column, is_bfloat16);
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
  for (int start = std::max(first, 0) / kChunk * kChunk; start < stop; start += kChunk) {
    if (!span.paths || start + kChunk <= span.cached) {
      const int known = span.paths ? span.cached : stop;  // while this chunk is computed the next is on its way
      prefetch(args, span, start + kChunk, std::min(start + 2 * kChunk, known), kv_head);
      const Context c = see_chain(args, span, start, std::min(kChunk, stop - start), kv_head, w);
      reduce(args, c, w, start, 0, w.queries, ahead);
      continue;
    }
    for (int r = 0; r < rows; ++r) {
      const int n = std::min(kChunk, w.last[r * share] + 1 - start);
      if (n <= 0) continue;
      const Context c = see_tree(args, span, start, n, begin + r, kv_head, w);
      reduce(args, c, w, start, r * share, (r + 1) * share, ahead);
    }
  }
  finish(args, w, span.first + begin, kv_head);
}

}  // namespace specserve::SPECSERVE_ISA
