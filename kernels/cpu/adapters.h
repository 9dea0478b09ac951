// Low-rank changes of weights, of each row its own. A row's sums run over inputs, then over ranks, in their order.
#pragma once

#include <algorithm>

#include "linear_tiles.h"
#include "pack.h"

namespace specserve::SPECSERVE_ISA {

inline F load_number(const Adapters& adapters, const uint8_t* numbers, int64_t i) {
  return adapters.is_bfloat16 ? load_bfloat((const uint16_t*)numbers + i) : load((const float*)numbers + i);
}

// x [R, kTile] += scale * b t, of one tile of outputs; t [R, stride] are the rows' own.
template <int R>
void expand_rows(const Adapters& adapters, const Adapter& adapter, const float* t, int tile, float scale, float* x) {
  const AdapterTile& own = adapter.tiles[tile];
  F sum[R][kVectors];
  for (auto& row : sum)
    for (F& some : row) some = zero();
  for (int64_t k = 0; k < own.count; ++k) {
    F b[kVectors];
    for (int v = 0; v < kVectors; ++v) b[v] = load_number(adapters, adapter.b, own.start + k * kTile + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const F value = set(t[r * adapters.stride + own.first + k]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(b[v], value, sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* out = x + r * kTile + v * kLanes;
      store(out, fma(sum[r][v], set(scale), load(out)));
    }
}

template <int R = kMaxRows>
void expand_any(int rows, const Adapters& adapters, const Adapter& adapter, const float* t, int tile, float* x) {
  if constexpr (R > 1)
    if (rows < R) return expand_any<R - 1>(rows, adapters, adapter, t, tile, x);
  expand_rows<R>(adapters, adapter, t, tile, 1.0f, x);
}

// The row after those from `first` on, up to `last`, that have the same adapter.
inline int same_adapter(const Adapters& adapters, int first, int last) {
  int next = first + 1;
  while (next < last && adapters.of_row(next) == adapters.of_row(first)) ++next;
  return next;
}

// x [last - first, kTile] += b t of rows [first, last) and one tile of outputs.
inline void add_adapters(const Adapters& adapters, int first, int last, int tile, float* x) {
  if (!adapters.bank) return;
  for (int row = first; row < last;) {
    const int next = same_adapter(adapters, row, std::min(last, row + kMaxRows));
    if (const Adapter* adapter = adapters.of_row(row))
      expand_any(next - row, adapters, *adapter, adapters.shrunk + int64_t(row) * adapters.stride, tile, x + (row - first) * kTile);
    row = next;
  }
}

// Neighbouring rows of one adapter share a tile's way through the registers.
inline void shrink(const ShrinkArgs& args, int rows, int begin, int end) {
  float sums[kMaxIntRows * kTile];
  Ahead nothing{};
  for (int i = begin; i < end;) {
    const int tile = i / rows, first = i % rows;
    const Adapter* adapter = args.adapters.of_row(first);
    const int last = same_adapter(args.adapters, first, first + std::min({end - i, rows - first, most_rows(args.format, rows)}));
    i += last - first;
    if (!adapter || tile * kTile >= adapter->rank) continue;
    const Weight a{args.format, int(adapter->rank), args.x.width, tile_bytes(args.format, args.x.width), adapter->a};
    tile_any(last - first, a, tile, args.x, first, sums, nothing);
    for (int r = first; r < last; ++r)
      std::memcpy(args.adapters.shrunk + int64_t(r) * args.adapters.stride + tile * kTile, sums + (r - first) * kTile,
                  kTile * sizeof(float));
  }
}

inline void embed_adapters(const EmbedAdaptersArgs& args, int begin, int end) {
  for (int row = begin; row < end; ++row) {
    const Adapter* adapter = args.adapters.of_row(row);
    if (!adapter) continue;
    float* t = args.adapters.shrunk + int64_t(row) * args.adapters.stride;
    const int64_t from = args.ids[row] * adapter->rank;
    for (int64_t k = 0; k < adapter->rank; k += kLanes) store(t + k, load_number(args.adapters, adapter->a, from + k));
    for (int tile = 0; tile < args.width / kTile; ++tile)
      expand_rows<1>(args.adapters, *adapter, t, tile, args.scale, args.residual + int64_t(row) * args.width + tile * kTile);
  }
}

}  // namespace specserve::SPECSERVE_ISA
