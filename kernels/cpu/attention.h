// Attention of a few rows of one sequence, for the query heads that share one kv head, over the paged cache.
//
// The context is reduced in chunks of kChunk logical tokens with a running maximum (Milakov and Gimelshein, 2018), and
// segments of kSegment of them are added one after the other, in whatever order and by whatever thread they were computed
// (Flash-Decoding: Dao et al., 2023). Chunks start at logical index 0 and hold the same numbers in the same order for a row
// of a chain, of a tree and of a prompt, and what a row does not see adds exact zeros: its bits are those of the row alone.
#pragma once

#include "args.h"
#include "context.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kChunkVectors = kChunk / kLanes;
constexpr int kAtOnce = 4;         // of these, summed at a time
constexpr int kSlice = std::max(4 * kLanes, kTile);  // of a head's numbers, summed at a time: registers hold no more
static_assert(kChunk % kPartialSums == 0 && kChunkVectors % kAtOnce == 0 && kSegment % kChunk == 0);
constexpr float kLog2E = 1.44269504f;
constexpr int64_t kFetchedBytes = 1024;  // of the weights that follow, with every query of a chunk: memory rests meanwhile

// A chunk's words in vectors, and a sum with their products. `kMost` queries share the registers.
struct Floats {
  using Word = float;
  static constexpr int kNumbers = 1, kMost = kQueries;
  static F load(const Word* p) { return SPECSERVE_ISA::load(p); }
  static F add(F sum, F words, const float* x) { return fma(words, set(*x), sum); }
};
struct Halves : Floats {
  using Word = uint16_t;
  static F load(const Word* p) { return load_half(p); }
};
struct Pairs {
  using Word = uint32_t;
  static constexpr int kNumbers = 2, kMost = kBfloat16Queries;
  static Bytes load(const Word* p) { return load_bytes(p); }
  static F add(F sum, Bytes words, const float* x) { return dot2(sum, words, spread(x)); }
};

inline void clear(const Workspace& w, const Sums& sums) {
  std::fill(sums.values, sums.values + int64_t(w.queries) * w.width, 0.0f);
  std::fill(sums.top, sums.top + w.queries, -INFINITY);
  std::fill(sums.total, sums.total + w.queries, 0.0f);
}

// The share of the next chunk's groups that tile `tile` of `tiles` asks for, line by line, while it computes: all at once
// they would fill the queue to memory, and then arithmetic would wait.
struct Coming {
  const Context* chunk;  // null: nothing
  int tile, tiles;

  template <class Use>  // use(group), of part `part` of `parts` of the tile
  void each_group(int part, int parts, Use use) const {
    if (!chunk) return;
    const int here = tile * parts + part, all = tiles * parts;
    for (int g = kGroups * here / all; g < kGroups * (here + 1) / all; ++g) use(g);
  }
};

// scores[q, t] = q . key t, for Q queries.
template <int Q, class Form>
void score(const Context& c, const Workspace& w, int first, const Coming& coming) {
  const int steps = w.width / Form::kNumbers;
  for (int begin = 0; begin < kChunkVectors; begin += kAtOnce) {
    const typename Form::Word* keys[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      const int token = (begin + v) * kLanes;
      keys[v] = (const typename Form::Word*)c.keys[token / kSlotGroup] + token % kSlotGroup;
    }
    F sum[Q][kAtOnce];
    for (auto& s : sum)
      for (F& lane : s) lane = zero();
    const char* ahead[kGroups];
    int num_ahead = 0;
    coming.each_group(begin / kAtOnce, kChunkVectors / kAtOnce, [&](int g) { ahead[num_ahead++] = (const char*)coming.chunk->keys[g]; });
    const int64_t step = coming.chunk ? kSlotGroup * coming.chunk->word_bytes() : 0;
    for (int i = 0; i < steps; ++i) {
      for (int g = 0; g < num_ahead; ++g) __builtin_prefetch(ahead[g] + i * step);
      for (int v = 0; v < kAtOnce; ++v) {
        const auto words = Form::load(keys[v] + i * kSlotGroup);
        for (int q = 0; q < Q; ++q) sum[q][v] = Form::add(sum[q][v], words, w.q + int64_t(first + q) * w.width + i);
      }
    }
    for (int q = 0; q < Q; ++q)
      for (int v = 0; v < kAtOnce; ++v) store(w.scores + int64_t(first + q) * kChunk + (begin + v) * kLanes, sum[q][v]);
  }
}

// 0, 1, 2 and so on, for the distances of a chunk's tokens.
struct Tokens {
  float number[kChunk];
  constexpr Tokens() : number() {
    for (int t = 0; t < kChunk; ++t) number[t] = float(t);
  }
};
inline constexpr Tokens kTokens;

inline bool sees(const Workspace& w, int query, int start, int window) {
  const int last = w.last[query];
  return last >= start && !(window && last - window + 1 >= start + kChunk);
}

// Scores, times `scale` as powers of two and less the query's slope for each token of distance (ALiBi), into probabilities
// relative to the running maximum; sums are rescaled where that rises.
inline void softmax_chunk(const Workspace& w, const Sums& sums, int query, int start, float scale, int window, bool in_pairs) {
  const int last = w.last[query], first = window ? last - window + 1 : 0;
  const float slope = w.slopes[query];
  float* scores = w.scores + int64_t(query) * kChunk;
  for (int t = 0; t < first - start; ++t) scores[t] = -INFINITY;
  for (int t = std::max(0, last + 1 - start); t < kChunk; ++t) scores[t] = -INFINITY;
  F p[kChunkVectors];
  F peak = set(-INFINITY);
  for (int v = 0; v < kChunkVectors; ++v) {
    p[v] = mul(load(scores + v * kLanes), set(scale));
    if (slope != 0) p[v] = fma(add(load(kTokens.number + v * kLanes), set(float(start - last))), set(slope), p[v]);
    peak = max(peak, p[v]);
  }
  const float before = sums.top[query], top = std::max(before, hmax(peak));
  PartialSums total;
  for (int v = 0; v < kChunkVectors; ++v) {
    p[v] = exp2_of_negative(sub(p[v], set(top)));
    F& sum = total.v[v % PartialSums::kVectors];
    sum = add(sum, p[v]);
    if (in_pairs)
      store_bfloat((uint16_t*)scores + v * kLanes, p[v]);
    else
      store(scores + v * kLanes, p[v]);
  }
  if (top != before) {
    const float shrink = before == -INFINITY ? 0.0f : std::exp2(before - top);
    float* values = sums.values + int64_t(query) * w.width;
    for (int i = 0; i < w.width; i += kLanes) store(values + i, mul(load(values + i), set(shrink)));
    sums.total[query] *= shrink;
    sums.top[query] = top;
  }
  sums.total[query] += total.total();
}

// sums[q] += probabilities . values, for Q queries and some vectors of numbers.
template <int Q, int vectors, class Form>
void weigh_vectors(const Context& c, const Workspace& w, const Sums& sums, const int32_t* queries, int column, const Coming& coming) {
  constexpr int steps = kSlotGroup / Form::kNumbers;
  F sum[Q][vectors];
  const float* probabilities[Q];
  for (int q = 0; q < Q; ++q) {
    probabilities[q] = w.scores + int64_t(queries[q]) * kChunk;
    for (int v = 0; v < vectors; ++v) sum[q][v] = load(sums.values + int64_t(queries[q]) * w.width + column + v * kLanes);
  }
  bool is_coming[kGroups] = {};
  coming.each_group(0, 1, [&](int g) { is_coming[g] = true; });
  const int word = coming.chunk ? coming.chunk->word_bytes() : 0;
  for (int g = 0; g < kGroups; ++g) {
    const typename Form::Word* values = (const typename Form::Word*)c.values[g] + column;
    const char* ahead = is_coming[g] ? (const char*)coming.chunk->values[g] + column * word : nullptr;
    for (int t = 0; t < steps; ++t) {
      if (ahead)
        for (int i = 0; i < vectors * kLanes * word; i += 64) __builtin_prefetch(ahead + t * w.width * word + i);
      for (int v = 0; v < vectors; ++v) {
        const auto words = Form::load(values + t * w.width + v * kLanes);
        for (int q = 0; q < Q; ++q) sum[q][v] = Form::add(sum[q][v], words, probabilities[q] + g * steps + t);
      }
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < vectors; ++v) store(sums.values + int64_t(queries[q]) * w.width + column + v * kLanes, sum[q][v]);
}

template <class Form, int Q = Form::kMost>
void score_some(const Context& c, const Workspace& w, int first, int n, const Coming& coming) {
  if constexpr (Q > 1)
    if (n < Q) return score_some<Form, Q - 1>(c, w, first, n, coming);
  score<Q, Form>(c, w, first, coming);
}

template <class Form, int Q = Form::kMost>
void weigh_some(const Context& c, const Workspace& w, const Sums& sums, const int32_t* queries, int n, int column, const Coming& coming) {
  if constexpr (Q > 1)
    if (n < Q) return weigh_some<Form, Q - 1>(c, w, sums, queries, n, column, coming);
  if (w.width - column >= kSlice) return weigh_vectors<Q, kSlice / kLanes, Form>(c, w, sums, queries, column, coming);
  weigh_vectors<Q, kTile / kLanes, Form>(c, w, sums, queries, column, coming);
}

// Queries [first, last) against the chunk that begins at logical index `start`. All are scored, then all weighed: keys or
// values stay in the innermost cache meanwhile.
template <class Form>
void reduce(const AttentionArgs& args, const Context& c, const Workspace& w, const Sums& sums, int start, int first, int last, Ahead& ahead, const Context* next) {
  while (first < last && !sees(w, first, start, args.window)) ++first;
  while (first < last && !sees(w, last - 1, start, args.window)) --last;
  Coming coming{next, 0, (last - first + Form::kMost - 1) / Form::kMost};
  each_block(last - first, Form::kMost, [&](int from, int to) {
    score_some<Form>(c, w, first + from, to - from, coming);
    ++coming.tile;
  });
  int n = 0;
  for (int q = first; q < last; ++q) {
    fetch<false>(ahead, kFetchedBytes);
    if (!sees(w, q, start, args.window)) continue;
    softmax_chunk(w, sums, q, start, args.scale * kLog2E, args.window, Form::kNumbers == 2);
    w.seeing[n++] = q;
  }
  for (int column = 0; column < w.width; column += kSlice) {
    coming = {next, 0, (n + Form::kMost - 1) / Form::kMost};
    each_block(n, Form::kMost, [&](int from, int to) {
      weigh_some<Form>(c, w, sums, w.seeing + from, to - from, column, coming);
      ++coming.tile;
    });
  }
}

inline void reduce(const AttentionArgs& args, const Context& c, const Workspace& w, const Sums& sums, int start, int first, int last, Ahead& ahead, const Context* next = nullptr) {
  switch (c.words) {
    case Words::kFloats: return reduce<Floats>(args, c, w, sums, start, first, last, ahead, next);
    case Words::kHalves: return reduce<Halves>(args, c, w, sums, start, first, last, ahead, next);
    case Words::kPairs: return reduce<Pairs>(args, c, w, sums, start, first, last, ahead, next);
  }
}

// Rows of one sequence against its context.
struct RowRange {
  const Span& span;
  int begin, end, kv_head;
  int first = INT32_MAX, stop = 0;  // the logical indexes that any of them sees

  RowRange(const AttentionArgs& args, const Span& span, int begin, int end, int kv_head, const Workspace& w)
      : span(span), begin(begin), end(end), kv_head(kv_head) {
    const int share = args.heads / args.kv_heads, d = args.head_dim;
    for (int i = 0; i < w.queries; ++i) {
      const int r = begin + i / share;
      const float* q = args.q + int64_t(span.first + r) * args.q_stride + (kv_head * share + i % share) * d;
      float* to = w.q + int64_t(i) * w.width;
      std::fill(to, to + w.width, 0.0f);
      store_head(args.cache.number == Number::kBfloat16 ? Number::kBfloat16 : Number::kFloat32, to, q, d);
      const int seen = span.paths ? span.path_starts[r + 1] - span.path_starts[r] : span.is_block ? span.last - span.first : r + 1;
      w.last[i] = span.cached + seen - 1;
      w.slopes[i] = args.slopes ? args.slopes[kv_head * share + i % share] * kLog2E : 0.0f;
      first = std::min(first, args.window ? w.last[i] - args.window + 1 : 0);
      stop = std::max(stop, w.last[i] + 1);
    }
    first = std::max(first, 0);
  }
};

// What one segment of the context adds.
inline void read_segment(const AttentionArgs& args, const RowRange& rows, int segment, const Workspace& w, const Sums& sums, Ahead& ahead) {
  const Span& span = rows.span;
  const int share = args.heads / args.kv_heads, stop = std::min(rows.stop, (segment + 1) * kSegment);
  clear(w, sums);
  for (int start = std::max(rows.first, segment * kSegment) / kChunk * kChunk; start < stop; start += kChunk) {
    if (!span.paths || start + kChunk <= span.cached) {
      const int known = span.paths ? span.cached : rows.stop;  // while this chunk is computed the next is on its way
      const Context c = see_chain(args, span, start, std::min(kChunk, rows.stop - start), rows.kv_head, w);
      if (has_groups(args, span) && start + 2 * kChunk <= known) {
        const Context next = in_groups(args, span, start + kChunk, kChunk, rows.kv_head, false, w);
        reduce(args, c, w, sums, start, 0, w.queries, ahead, &next);
      } else {
        prefetch(args, span, start + kChunk, std::min(start + 2 * kChunk, known), rows.kv_head);
        reduce(args, c, w, sums, start, 0, w.queries, ahead);
      }
      continue;
    }
    for (int r = rows.begin; r < rows.end; ++r) {
      const int query = (r - rows.begin) * share, n = std::min(kChunk, w.last[query] + 1 - start);
      if (n <= 0) continue;
      const Context c = see_tree(args, span, start, n, r, rows.kv_head, w);
      reduce(args, c, w, sums, start, query, query + share, ahead);
    }
  }
}

// Adds those of the next segment to the sums so far.
inline void merge(const Workspace& w, const Sums& next) {
  for (int q = 0; q < w.queries; ++q) {
    if (next.total[q] == 0) continue;
    float* sum = w.all.values + int64_t(q) * w.width;
    const float* more = next.values + int64_t(q) * w.width;
    if (w.all.total[q] == 0) {
      std::memcpy(sum, more, w.width * sizeof(float));
      w.all.total[q] = next.total[q];
      w.all.top[q] = next.top[q];
      continue;
    }
    const float top = std::max(w.all.top[q], next.top[q]);
    const float old = std::exp2(w.all.top[q] - top), young = std::exp2(next.top[q] - top);
    for (int i = 0; i < w.width; i += kLanes)
      store(sum + i, fma(load(more + i), set(young), mul(load(sum + i), set(old))));
    w.all.total[q] = w.all.total[q] * old + next.total[q] * young;
    w.all.top[q] = top;
  }
}

// Sums over totals, where the next linear layer reads them.
inline void finish(const AttentionArgs& args, const Workspace& w, int row, int kv_head) {
  const int d = args.head_dim, columns = args.heads / args.kv_heads * d;
  for (int q = 0; q < w.queries; ++row) {
    for (int column = 0; column < columns; column += d, ++q) {
      const F total = set(w.all.total[q]);
      for (int i = 0; i < d; i += kLanes)  // what is written beyond d is overwritten by the next
        store(w.joined + column + i, div(load(w.all.values + int64_t(q) * w.width + i), total));
    }
    if (columns % kTile)
      std::memcpy((float*)args.out.data + int64_t(row) * args.out.width + kv_head * columns, w.joined, columns * sizeof(float));
    else
      for (int i = 0; i < columns; i += kTile) store_tile(args.out, row, kv_head * columns + i, w.joined + i);
  }
}

inline Workspace workspace_of(const AttentionArgs& args, int begin, int end, void* scratch) {
  const int share = args.heads / args.kv_heads;
  return lay_out(scratch, (end - begin) * share, share, args.head_dim);
}

inline void attention(const AttentionArgs& args, const Span& span, int begin, int end, int kv_head, void* scratch, Ahead& ahead) {
  const Workspace w = workspace_of(args, begin, end, scratch);
  const RowRange rows(args, span, begin, end, kv_head, w);
  int segment = rows.first / kSegment;
  read_segment(args, rows, segment, w, w.all, ahead);
  while (++segment * kSegment < rows.stop) {
    read_segment(args, rows, segment, w, w.segment, ahead);
    merge(w, w.segment);
  }
  finish(args, w, span.first + begin, kv_head);
}

inline void attention_segment(const AttentionArgs& args, const Span& span, int begin, int end, int kv_head, int segment, float* part, void* scratch, Ahead& ahead) {
  const Workspace w = workspace_of(args, begin, end, scratch);
  read_segment(args, RowRange(args, span, begin, end, kv_head, w), segment, w, sums_at(part, w.queries, w.width), ahead);
}

inline void merge_segments(const AttentionArgs& args, const Span& span, int begin, int end, int kv_head, int segments, float* parts, void* scratch) {
  const Workspace w = workspace_of(args, begin, end, scratch);
  clear(w, w.all);
  for (int i = 0; i < segments; ++i) merge(w, sums_at(parts + i * part_floats(w.queries, args.head_dim), w.queries, w.width));
  finish(args, w, span.first + begin, kv_head);
}

}  // namespace specserve::SPECSERVE_ISA
