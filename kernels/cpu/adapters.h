// Low-rank changes of weights, of each row its own. A row's sums run over inputs, then over ranks, in their order.
#pragma once

#include <algorithm>

#include "linear_tiles.h"
#include "pack.h"

namespace specserve::SPECSERVE_ISA {

inline F load_number(const Adapters& adapters, const uint8_t* numbers, int64_t i) {
  return adapters.is_bfloat16 ? load_bfloat((const uint16_t*)numbers + i) : load((const float*)numbers + i);
}

// x [kTile] += scale * b t, of one tile of outputs; t are the row's own.
inline void expand_tile(const Adapters& adapters, const Adapter& adapter, const float* t, int tile, float scale, float* x) {
  const AdapterTile& own = adapter.tiles[tile];
  F sum[kVectors];
  for (F& some : sum) some = zero();
  for (int64_t k = 0; k < own.count; ++k) {
    const F value = set(t[own.first + k]);
    for (int v = 0; v < kVectors; ++v)
      sum[v] = fma(load_number(adapters, adapter.b, own.start + k * kTile + v * kLanes), value, sum[v]);
  }
  for (int v = 0; v < kVectors; ++v) store(x + v * kLanes, fma(sum[v], set(scale), load(x + v * kLanes)));
}

inline void add_adapter(const Adapters& adapters, int64_t row, int tile, float* x) {
  if (!adapters.bank) return;
  if (const Adapter* adapter = adapters.of_row(row))
    expand_tile(adapters, *adapter, adapters.shrunk + row * adapters.stride, tile, 1.0f, x);
}

// Neighbouring rows of one adapter share a tile's way through the registers.
inline void shrink(const ShrinkArgs& args, int rows, int begin, int end) {
  float sums[kMaxIntRows * kTile];
  Ahead nothing{};
  for (int i = begin; i < end;) {
    const int tile = i / rows, first = i % rows;
    int last = first + 1;
    const Adapter* adapter = args.adapters.of_row(first);
    const int most = first + std::min({end - i, rows - first, most_rows(args.format)});
    while (last < most && args.adapters.of_row(last) == adapter) ++last;
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
      expand_tile(args.adapters, *adapter, t, tile, args.scale, args.residual + int64_t(row) * args.width + tile * kTile);
  }
}

}  // namespace specserve::SPECSERVE_ISA
