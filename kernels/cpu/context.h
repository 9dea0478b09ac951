// Keys and values: how rows are stored in the cache, and a chunk of them as attention reads it.
//
// Cache::kBfloat16Groups holds what attention reads: for every kSlotGroup slots and each kv head, as pairs in words of 32
// bits, keys [head_dim / 2][kSlotGroup slots] (two numbers of a token) and values [kSlotGroup / 2][head_dim] (one number of
// two tokens). The other formats hold [slots, kv_heads, head_dim], and a chunk of theirs is brought into this order first.
#pragma once

#include "args.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kGroups = kChunk / kSlotGroup;

// Views of one thread's scratch. Numbers are float32, or pairs of bfloat16 if the cache holds these.
struct Workspace {
  int queries, width;  // rows of q; padded head_dim
  float* q;              // [queries, width]
  float *keys, *values;  // [kChunk, width] each, room for a chunk as Context has it
  float* scores;         // [queries, kChunk]
  float* sums;           // [queries, width]
  float* joined;         // [share * head_dim and kTile]: what one row's heads come to
  float *top, *total;    // [queries]
  int32_t* last;         // [queries]: the last logical index it sees
};

inline Workspace lay_out(void* scratch, int queries, int share, int head_dim) {
  Workspace w;
  w.queries = queries;
  w.width = int(padded(head_dim));
  float* next = (float*)scratch;
  const auto take = [&next](int64_t n) {
    float* p = next;
    next += padded(n);
    return p;
  };
  w.q = take(int64_t(queries) * w.width);
  w.keys = take(int64_t(w.width) * kChunk);
  w.values = take(int64_t(w.width) * kChunk);
  w.scores = take(int64_t(queries) * kChunk);
  w.sums = take(int64_t(queries) * w.width);
  w.joined = take(int64_t(share) * head_dim + kTile);
  w.top = take(queries);
  w.total = take(queries);
  w.last = (int32_t*)take(queries);
  return w;
}

// One chunk, in groups of kSlotGroup logical tokens: keys [width or width / 2][kSlotGroup], values [kSlotGroup or
// kSlotGroup / 2][width]. Values of tokens that no row sees are finite; in the group in which the context ends they are
// zeros.
struct Context {
  const float *keys[kGroups], *values[kGroups];
};

inline Context in_scratch(const Workspace& w) {
  Context c;
  for (int g = 0; g < kGroups; ++g) {
    c.keys[g] = w.keys + g * w.width * kSlotGroup;
    c.values[g] = w.values + g * w.width * kSlotGroup;
  }
  return c;
}

// Where the group of logical index `index` begins, for a kv head of Cache::kBfloat16Groups, in numbers.
inline int64_t group_at(int64_t slot, int kv_heads, int kv_head, int head_dim) {
  return (slot / kSlotGroup * kv_heads + kv_head) * head_dim * kSlotGroup;
}

inline void store_key(Cache cache, void* keys, int64_t slot, int kv_heads, int kv_head, const float* x, int d) {
  const int64_t plain = (slot * kv_heads + kv_head) * d;
  if (cache != Cache::kBfloat16Groups) return store_head(cache == Cache::kBfloat16, keys, plain, x, d);
  uint16_t rounded[kMaxHead];
  store_head(true, rounded, 0, x, d);
  uint16_t* to = (uint16_t*)keys + group_at(slot, kv_heads, kv_head, d) + 2 * (slot % kSlotGroup);
  for (int i = 0; i < d; i += 2) std::memcpy(to + i * kSlotGroup, rounded + i, 4);
}

inline void store_value(Cache cache, void* values, int64_t slot, int kv_heads, int kv_head, const float* x, int d) {
  const int64_t plain = (slot * kv_heads + kv_head) * d, place = slot % kSlotGroup;
  if (cache != Cache::kBfloat16Groups) return store_head(cache == Cache::kBfloat16, values, plain, x, d);
  uint16_t rounded[kMaxHead];
  store_head(true, rounded, 0, x, d);
  uint16_t* to = (uint16_t*)values + group_at(slot, kv_heads, kv_head, d) + place / 2 * 2 * d + place % 2;
  for (int i = 0; i < d; ++i) to[2 * i] = rounded[i];
}

// Keys and values of up to kChunk slots into the scratch, zeros after them.
inline void gather_float32(const AttentionArgs& args, const int64_t* slots, int n, int kv_head, const Workspace& w) {
  const int d = args.head_dim;
  std::fill(w.keys, w.keys + w.width * kChunk, 0.0f);
  std::fill(w.values, w.values + w.width * kChunk, 0.0f);
  for (int t = 0; t < n; ++t) {
    const int64_t at = (slots[t] * args.kv_heads + kv_head) * d;
    const int group = t / kSlotGroup * w.width, place = t % kSlotGroup;
    for (int i = 0; i < d; ++i) w.keys[(group + i) * kSlotGroup + place] = ((const float*)args.keys)[at + i];
    std::memcpy(w.values + int64_t(t) * w.width, (const float*)args.values + at, d * sizeof(float));
  }
}

// kLanes rows of kLanes words, from rows[i] + start on, into columns `stride` words apart: out[j * stride + i] = word j of
// row i. A template: where simd_*.h has a function of this name, that is called.
template <int n = kLanes>
void transpose(const uint16_t* const* rows, int start, uint32_t* out, int stride) {
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) std::memcpy(out + j * stride + i, rows[i] + start + 2 * j, 4);
}

inline void gather_bfloat16(const AttentionArgs& args, const int64_t* slots, int n, int kv_head, const Workspace& w) {
  const int d = args.head_dim;
  uint32_t* keys = (uint32_t*)w.keys;
  uint32_t* values = (uint32_t*)w.values;
  static const uint16_t zeros[kMaxHead] = {};
  const uint16_t* tokens[kChunk];
  for (int t = 0; t < kChunk; ++t)
    tokens[t] = t < n ? (const uint16_t*)args.keys + (slots[t] * args.kv_heads + kv_head) * d : zeros;
  const auto key_at = [&](int t, int pair) { return keys + (t / kSlotGroup * w.width + pair) * kSlotGroup + t % kSlotGroup; };
  int pair = 0;
  for (; pair + kLanes <= d / 2; pair += kLanes)
    for (int t = 0; t < kChunk; t += kLanes) transpose(tokens + t, 2 * pair, key_at(t, pair), kSlotGroup);
  for (; pair < w.width / 2; ++pair)
    for (int t = 0; t < kChunk; ++t) {
      const uint32_t low = 2 * pair < d ? tokens[t][2 * pair] : 0, high = 2 * pair + 1 < d ? tokens[t][2 * pair + 1] : 0;
      *key_at(t, pair) = low | high << 16;
    }
  for (int t = 0; t < kChunk; t += 2) {
    const uint16_t* even = t < n ? (const uint16_t*)args.values + (slots[t] * args.kv_heads + kv_head) * d : zeros;
    const uint16_t* odd = t + 1 < n ? (const uint16_t*)args.values + (slots[t + 1] * args.kv_heads + kv_head) * d : zeros;
    uint32_t* to = values + (t / kSlotGroup * kSlotGroup + t % kSlotGroup / 2) * w.width;
    int i = 0;
    for (; i + kTile <= d; i += kTile)
      for (int j = i; j < i + kTile; ++j) to[j] = uint32_t(even[j]) | uint32_t(odd[j]) << 16;
    for (; i < d; ++i) to[i] = uint32_t(even[i]) | uint32_t(odd[i]) << 16;
    std::fill(to + d, to + w.width, 0);
  }
}

// The same for tokens [first, n) of a cache in groups, first a multiple of kSlotGroup.
inline void gather_groups(const AttentionArgs& args, const int64_t* slots, int first, int n, int kv_head, const Workspace& w) {
  const int d = args.head_dim;
  std::fill(w.keys + first * d, w.keys + kChunk * d, 0.0f);
  std::fill(w.values + first * d, w.values + kChunk * d, 0.0f);
  for (int t = first; t < n; ++t) {
    const int64_t at = group_at(slots[t], args.kv_heads, kv_head, d), from = slots[t] % kSlotGroup, to = t % kSlotGroup;
    const uint32_t* keys = (const uint32_t*)((const uint16_t*)args.keys + at) + from;
    const uint16_t* values = (const uint16_t*)args.values + at + from / 2 * 2 * d + from % 2;
    uint32_t* key = (uint32_t*)w.keys + (t - to) * d + to;
    uint16_t* value = (uint16_t*)(w.values + (t - to) * d) + to / 2 * 2 * d + to % 2;
    for (int i = 0; i < d / 2; ++i) key[i * kSlotGroup] = keys[i * kSlotGroup];
    for (int i = 0; i < d; ++i) value[2 * i] = values[2 * i];
  }
}

inline Context gather(const AttentionArgs& args, const int64_t* slots, int n, int kv_head, const Workspace& w) {
  switch (args.cache) {
    case Cache::kFloat32: gather_float32(args, slots, n, kv_head, w); break;
    case Cache::kBfloat16: gather_bfloat16(args, slots, n, kv_head, w); break;
    case Cache::kBfloat16Groups: gather_groups(args, slots, 0, n, kv_head, w); break;
  }
  return in_scratch(w);
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

// Whether kSlotGroup logical tokens are a group of the cache.
inline bool has_groups(const AttentionArgs& args, const Span& span) {
  return args.cache == Cache::kBfloat16Groups && span.block_size % kSlotGroup == 0;
}

inline int64_t group_of(const AttentionArgs& args, const Span& span, int index, int kv_head) {
  const int64_t slot = int64_t(span.blocks[index / span.block_size]) * span.block_size + index % span.block_size;
  return group_at(slot, args.kv_heads, kv_head, args.head_dim);
}

// The first n of a group's values, zeros after them: there may be old ones, even what is not finite.
inline void copy_values(const uint16_t* values, int n, int d, uint32_t* out) {
  const int whole = n / 2 * d;
  std::memcpy(out, values, whole * sizeof(uint32_t));
  std::fill(out + whole, out + kSlotGroup / 2 * d, 0);
  if (n % 2)
    for (int i = 0; i < d; ++i) out[whole + i] = values[2 * (whole + i)];
}

// The n tokens from `start` on where they lie, in groups. Groups that the context does not reach are the first one again.
inline Context in_place(const AttentionArgs& args, const Span& span, int start, int n, int kv_head, const Workspace& w) {
  Context c = in_scratch(w);
  for (int g = 0; g < kGroups; ++g) {
    const int left = n - g * kSlotGroup;
    const int64_t at = left > 0 ? group_of(args, span, start + g * kSlotGroup, kv_head) : 0;
    const uint16_t* values = (const uint16_t*)args.values + at;
    c.keys[g] = left > 0 ? (const float*)((const uint16_t*)args.keys + at) : c.keys[0];
    if (left > 0 && left < kSlotGroup) copy_values(values, left, args.head_dim, (uint32_t*)c.values[g]);
    if (left <= 0) c.values[g] = c.values[0];
    if (left >= kSlotGroup) c.values[g] = (const float*)values;
  }
  return c;
}

// n tokens of the chunk from `start` on as all rows of a chain see them.
inline Context see_chain(const AttentionArgs& args, const Span& span, int start, int n, int kv_head, const Workspace& w) {
  if (has_groups(args, span)) return in_place(args, span, start, n, kv_head, w);
  int64_t slots[kChunk];
  write_slots(span, start, start + n, slots);
  return gather(args, slots, n, kv_head, w);
}

// n tokens of the chunk as row r of a tree sees them: cached ones, then its ancestors and itself as if they were a chain.
inline Context see_tree(const AttentionArgs& args, const Span& span, int start, int n, int r, int kv_head, const Workspace& w) {
  const int32_t* path = span.paths + span.path_starts[r];
  int64_t slots[kChunk];
  int64_t* next = write_slots(span, start, std::min(start + n, span.cached), slots);
  for (int index = std::max(start, span.cached); index < start + n; ++index) {
    const int at = span.cached + path[index - span.cached];
    next = write_slots(span, at, at + 1, next);
  }
  if (!has_groups(args, span)) return gather(args, slots, n, kv_head, w);
  const int whole = std::max(0, std::min(n, span.cached - start) / kSlotGroup * kSlotGroup);
  Context c = in_place(args, span, start, whole, kv_head, w);
  gather_groups(args, slots, whole, n, kv_head, w);
  const Context rest = in_scratch(w);
  for (int g = whole / kSlotGroup; g < kGroups; ++g) {
    c.keys[g] = rest.keys[g];
    c.values[g] = rest.values[g];
  }
  return c;
}

// Asks for the KV of logical tokens [begin, end): they lie apart, and hardware does not foresee them.
inline void prefetch(const AttentionArgs& args, const Span& span, int begin, int end, int kv_head) {
  const auto ask = [&args](int64_t at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch((const char*)args.keys + at + i);
      __builtin_prefetch((const char*)args.values + at + i);
    }
  };
  if (has_groups(args, span)) {
    for (int index = begin; index < end; index += kSlotGroup)
      ask(group_of(args, span, index, kv_head) * 2, int64_t(args.head_dim) * kSlotGroup * 2);
    return;
  }
  const int64_t bytes = args.head_dim * (args.cache == Cache::kFloat32 ? 4 : 2);
  each_run(span, begin, end, [&](int64_t slot, int n) {
    for (int64_t i = slot; i < slot + n; ++i) ask((i * args.kv_heads + kv_head) * bytes, bytes);
  });
}

}  // namespace specserve::SPECSERVE_ISA
