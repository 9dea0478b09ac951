// Rows times packed weights, a tile of outputs at a time: a tile is read from memory once, whatever the number of rows.
#pragma once

#include "adapters.h"
#include "linear_tiles.h"

namespace specserve::SPECSERVE_ISA {

inline void linear(const LinearArgs& args, int rows, int begin, int end, Ahead& ahead) {
  float sums[kMaxIntRows * kTile];
  Ahead nothing{};  // for the other rows a tile is at hand
  for (int tile = begin; tile < end; ++tile)
    each_block(rows, most_rows(args.weight.format, rows), [&](int first, int last) {
      tile_any(last - first, args.weight, tile, args.x, first, sums, first ? nothing : ahead);
      for (int r = first; r < last; ++r) add_bias(args.bias, tile * kTile, sums + (r - first) * kTile);
      add_adapters(args.adapters, first, last, tile, sums);
      for (int r = first; r < last; ++r) {
        float* out = args.out + int64_t(r) * args.weight.outputs + tile * kTile;
        std::memcpy(out, sums + (r - first) * kTile, kTile * sizeof(float));
      }
    });
}

// Tile t of the result is activation(tile 2t) * tile 2t + 1, or activation(tile t) where nothing is gated.
inline void gated(const GatedArgs& args, int rows, int begin, int end, Ahead& ahead) {
  float gates[kMaxIntRows * kTile], ups[kMaxIntRows * kTile];
  Ahead nothing{};
  for (int tile = begin; tile < end; ++tile)
    each_block(rows, most_rows(args.weight.format, rows), [&](int first, int last) {
      Ahead& own = first ? nothing : ahead;
      const int at = args.is_gated ? 2 * tile : tile;
      tile_any(last - first, args.weight, at, args.x, first, gates, own);
      if (args.is_gated) tile_any(last - first, args.weight, at + 1, args.x, first, ups, own);
      for (int r = first; r < last; ++r) {
        add_bias(args.bias, at * kTile, gates + (r - first) * kTile);
        if (args.is_gated) add_bias(args.bias, (at + 1) * kTile, ups + (r - first) * kTile);
      }
      add_adapters(args.adapters, first, last, at, gates);
      if (args.is_gated) add_adapters(args.adapters, first, last, at + 1, ups);
      for (int r = first; r < last; ++r) {
        float *gate = gates + (r - first) * kTile, *up = ups + (r - first) * kTile;
        for (int i = 0; i < kTile; i += kLanes) {
          const F g = activate(args.activation, load(gate + i));
          store(gate + i, args.is_gated ? mul(g, load(up + i)) : g);
        }
        store_tile(args.out, r, tile * kTile, gate);
      }
    });
}

}  // namespace specserve::SPECSERVE_ISA
