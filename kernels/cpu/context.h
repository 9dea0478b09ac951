// Keys and values: how rows are stored in the cache, and a chunk of them as attention reads it.
//
// A cache in groups holds what attention reads: for every kSlotGroup slots and each kv head keys [head_dim][kSlotGroup slots]
// and values [kSlotGroup][head_dim]; of bfloat16 pairs in words of 32 bits, keys [head_dim / 2][kSlotGroup slots] (two
// numbers of a token) and values [kSlotGroup / 2][head_dim] (one number of two tokens). Every other cache holds
// [slots, kv_heads, head_dim], and a chunk of it is brought into this order first.
#pragma once

#include "args.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kGroups = kChunk / kSlotGroup;

inline int64_t bytes_of(Number number) { return number == Number::kFloat32 ? 4 : 2; }

// What queries have seen so far: sums of values [queries, width], the highest score, and the total of probabilities relative
// to it; that is 0 until something is seen.
struct Sums {
  float *values, *top, *total;
};

inline Sums sums_at(float* p, int64_t queries, int width) { return {p, p + queries * width, p + queries * (width + 1)}; }

// Views of one thread's scratch. Numbers are float32, or pairs of bfloat16 if the cache holds these.
struct Workspace {
  int queries, width;  // rows of q; padded head_dim
  float* q;              // [queries, width]
  float *keys, *values;  // [kChunk, width] each, room for a chunk as Context has it
  float* scores;         // [queries, kChunk]
  Sums all, segment;     // of the context so far, and of the segment that is read
  float* joined;         // [share * head_dim and kTile]: what one row's heads come to
  float* slopes;         // [queries]: what a score loses, as a power of two, with each token between; 0: nothing
  int32_t* last;         // [queries]: the last logical index it sees
  int32_t* seeing;       // [queries]: those that see something of a chunk
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
  w.all = sums_at(take(part_floats(queries, head_dim)), queries, w.width);
  w.segment = sums_at(take(part_floats(queries, head_dim)), queries, w.width);
  w.joined = take(int64_t(share) * head_dim + kTile);
  w.slopes = take(queries);
  w.last = (int32_t*)take(queries);
  w.seeing = (int32_t*)take(queries);
  return w;
}

// How a chunk's numbers are multiplied: as float32, as float16 that is widened first, as pairs of bfloat16.
enum class Words { kFloats, kHalves, kPairs };

// One chunk, in groups of kSlotGroup logical tokens: keys [width or width / 2][kSlotGroup], values [kSlotGroup or
// kSlotGroup / 2][width]. Values of tokens that no row sees are finite; in the group in which the context ends they are
// zeros.
struct Context {
  Words words;
  const void *keys[kGroups], *values[kGroups];

  int word_bytes() const { return words == Words::kHalves ? 2 : 4; }
};

inline Context in_scratch(Words words, const Workspace& w) {
  Context c{words, {}, {}};
  for (int g = 0; g < kGroups; ++g) {
    c.keys[g] = w.keys + g * w.width * kSlotGroup;
    c.values[g] = w.values + g * w.width * kSlotGroup;
  }
  return c;
}

// Where the group of a slot begins, for a kv head of a cache in groups, in numbers.
inline int64_t group_at(int64_t slot, int kv_heads, int kv_head, int head_dim) {
  return (slot / kSlotGroup * kv_heads + kv_head) * head_dim * kSlotGroup;
}

// Where a head of a slot lies whose numbers are not in pairs: number i of the key at key + i * stride, of the value at
// value + i.
struct Place {
  int64_t key, stride, value;
};

inline Place place_of(Cache cache, int64_t slot, int kv_heads, int kv_head, int d) {
  const int64_t plain = (slot * kv_heads + kv_head) * d;
  if (!cache.in_groups) return {plain, 1, plain};
  const int64_t group = group_at(slot, kv_heads, kv_head, d), place = slot % kSlotGroup;
  return {group + place, kSlotGroup, group + place * d};
}

template <class Word>
void scatter(const void* words, int n, void* to, int64_t stride) {
  for (int i = 0; i < n; ++i) ((Word*)to)[i * stride] = ((const Word*)words)[i];
}

inline void store_key(Cache cache, void* keys, int64_t slot, int kv_heads, int kv_head, const float* x, int d) {
  const bool in_pairs = cache.in_groups && cache.number == Number::kBfloat16;
  const Place at = place_of(cache, slot, kv_heads, kv_head, d);
  float rounded[kMaxHead];
  store_head(cache.number, rounded, x, d);
  if (in_pairs) {
    uint16_t* group = (uint16_t*)keys + group_at(slot, kv_heads, kv_head, d);
    scatter<uint32_t>(rounded, d / 2, (uint32_t*)group + slot % kSlotGroup, kSlotGroup);
  } else if (cache.number == Number::kFloat32) {
    scatter<float>(rounded, d, (float*)keys + at.key, at.stride);
  } else {
    scatter<uint16_t>(rounded, d, (uint16_t*)keys + at.key, at.stride);
  }
}

inline void store_value(Cache cache, void* values, int64_t slot, int kv_heads, int kv_head, const float* x, int d) {
  if (!cache.in_groups || cache.number != Number::kBfloat16) {
    const int64_t at = place_of(cache, slot, kv_heads, kv_head, d).value;
    return store_head(cache.number, (char*)values + at * bytes_of(cache.number), x, d);
  }
  uint16_t rounded[kMaxHead];
  store_head(cache.number, rounded, x, d);
  const int64_t place = slot % kSlotGroup;
  uint16_t* to = (uint16_t*)values + group_at(slot, kv_heads, kv_head, d) + place / 2 * 2 * d + place % 2;
  for (int i = 0; i < d; ++i) to[2 * i] = rounded[i];
}

// d numbers of float32 or float16, `stride` apart, from number `at` on; `out` has room for whole vectors.
inline void widen(Number number, const void* from, int64_t at, int64_t stride, int d, float* out) {
  if (number == Number::kFloat32) {
    for (int i = 0; i < d; ++i) out[i] = ((const float*)from)[at + i * stride];
    return;
  }
  uint16_t some[kMaxHead];
  for (int i = 0; i < d; ++i) some[i] = ((const uint16_t*)from)[at + i * stride];
  std::fill(some + d, some + padded(d), 0);
  for (int i = 0; i < d; i += kLanes) store(out + i, load_half(some + i));
}

// Keys and values of tokens [first, n), first a multiple of kSlotGroup, into the scratch as floats, zeros after them.
inline void gather_floats(const AttentionArgs& args, const int64_t* slots, int first, int n, int kv_head, const Workspace& w) {
  const int d = args.head_dim;
  std::fill(w.keys + first * w.width, w.keys + w.width * kChunk, 0.0f);
  std::fill(w.values + first * w.width, w.values + w.width * kChunk, 0.0f);
  for (int t = first; t < n; ++t) {
    const Place at = place_of(args.cache, slots[t], args.kv_heads, kv_head, d);
    float key[kMaxHead];
    widen(args.cache.number, args.keys, at.key, at.stride, d, key);
    scatter<float>(key, d, w.keys + t / kSlotGroup * kSlotGroup * w.width + t % kSlotGroup, kSlotGroup);
    widen(args.cache.number, args.values, at.value, 1, d, w.values + int64_t(t) * w.width);
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
inline void gather_pairs(const AttentionArgs& args, const int64_t* slots, int first, int n, int kv_head, const Workspace& w) {
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

inline Context gather(const AttentionArgs& args, const int64_t* slots, int first, int n, int kv_head, const Workspace& w) {
  if (args.cache.number != Number::kBfloat16) {
    gather_floats(args, slots, first, n, kv_head, w);
    return in_scratch(Words::kFloats, w);
  }
  args.cache.in_groups ? gather_pairs(args, slots, first, n, kv_head, w) : gather_bfloat16(args, slots, n, kv_head, w);
  return in_scratch(Words::kPairs, w);
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
  return args.cache.in_groups && span.block_size % kSlotGroup == 0;
}

inline int64_t group_of(const AttentionArgs& args, const Span& span, int index, int kv_head) {
  const int64_t slot = int64_t(span.blocks[index / span.block_size]) * span.block_size + index % span.block_size;
  return group_at(slot, args.kv_heads, kv_head, args.head_dim);
}

// The first n of a group's values, zeros after them: there may be old ones, even what is not finite.
inline void copy_values(Number number, const void* values, int n, int d, void* out) {
  const int64_t size = bytes_of(number), whole = (number == Number::kBfloat16 ? n / 2 * 2 : n) * d;
  std::memcpy(out, values, whole * size);
  std::memset((char*)out + whole * size, 0, (kSlotGroup * d - whole) * size);
  if (number == Number::kBfloat16 && n % 2)
    for (int i = 0; i < d; ++i) ((uint16_t*)out)[whole + 2 * i] = ((const uint16_t*)values)[whole + 2 * i];
}

inline void widen_all(const void* halves, int64_t n, const void* out) {
  for (int64_t i = 0; i < n; i += kLanes) store((float*)out + i, load_half((const uint16_t*)halves + i));
}

// The n tokens from `start` on in groups: where they lie, or float16 as floats in the scratch, which takes a moment and then
// less for each query. Groups that the context does not reach are the first one again.
inline Context in_groups(const AttentionArgs& args, const Span& span, int start, int n, int kv_head, bool widened, const Workspace& w) {
  const Number number = args.cache.number;
  const bool is_half = number == Number::kFloat16;
  const int d = args.head_dim;
  Context c = in_scratch(number == Number::kBfloat16 ? Words::kPairs : is_half && !widened ? Words::kHalves : Words::kFloats, w);
  for (int g = 0; g < kGroups; ++g) {
    const int left = n - g * kSlotGroup;
    if (left <= 0) {
      c.keys[g] = c.keys[0];
      c.values[g] = c.values[0];
      continue;
    }
    const int64_t at = group_of(args, span, start + g * kSlotGroup, kv_head) * bytes_of(number);
    const void *keys = (const char*)args.keys + at, *values = (const char*)args.values + at;
    if (is_half && widened) {
      const int64_t whole = int64_t(std::min(left, kSlotGroup)) * d;
      widen_all(keys, kSlotGroup * d, c.keys[g]);
      widen_all(values, whole, c.values[g]);
      std::fill((float*)c.values[g] + whole, (float*)c.values[g] + kSlotGroup * d, 0.0f);
      continue;
    }
    c.keys[g] = keys;
    if (left < kSlotGroup)
      copy_values(number, values, left, d, (void*)c.values[g]);
    else
      c.values[g] = values;
  }
  return c;
}

// n tokens of the chunk from `start` on as all rows of a chain see them.
inline Context see_chain(const AttentionArgs& args, const Span& span, int start, int n, int kv_head, const Workspace& w) {
  if (has_groups(args, span)) return in_groups(args, span, start, n, kv_head, w.queries > kHalfQueries, w);
  int64_t slots[kChunk];
  write_slots(span, start, start + n, slots);
  return gather(args, slots, 0, n, kv_head, w);
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
  if (!has_groups(args, span)) return gather(args, slots, 0, n, kv_head, w);
  const int whole = std::max(0, std::min(n, span.cached - start) / kSlotGroup * kSlotGroup);
  Context c = in_groups(args, span, start, whole, kv_head, true, w);
  const Context rest = gather(args, slots, whole, n, kv_head, w);
  for (int g = whole / kSlotGroup; g < kGroups; ++g) {
    c.keys[g] = rest.keys[g];
    c.values[g] = rest.values[g];
  }
  return c;
}

// Asks for the KV of logical tokens [begin, end): they lie apart, and hardware does not foresee them.
inline void prefetch(const AttentionArgs& args, const Span& span, int begin, int end, int kv_head) {
  const int64_t size = bytes_of(args.cache.number);
  const auto ask = [&args](int64_t at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch((const char*)args.keys + at + i);
      __builtin_prefetch((const char*)args.values + at + i);
    }
  };
  if (has_groups(args, span)) {
    for (int index = begin; index < end; index += kSlotGroup)
      ask(group_of(args, span, index, kv_head) * size, int64_t(args.head_dim) * kSlotGroup * size);
    return;
  }
  const int64_t bytes = args.head_dim * size;
  each_run(span, begin, end, [&](int64_t slot, int n) {
    for (int64_t i = slot; i < slot + n; ++i) ask((i * args.kv_heads + kv_head) * bytes, bytes);
  });
}

}  // namespace specserve::SPECSERVE_ISA
