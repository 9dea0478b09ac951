// Rows times packed weights, a tile of outputs at a time: a tile is read from memory once, whatever the number of rows.
// Every row's sums run in the order of the inputs, so its bits do not depend on the rows beside it.
#pragma once

#include "args.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kVectors = kTile / kLanes;  // of the outputs of a tile
constexpr int kBytes = 4 * kLanes;        // of a vector

// A vector for each of the outputs of R rows.
template <int R, class V>
using Tile = V[R][kVectors];

template <int R>
void clear(Tile<R, F>& sum) {
  for (auto& row : sum)
    for (F& some : row) some = zero();
}

template <int R>
void store_sums(const Tile<R, F>& sum, float* out) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(out + r * kTile + v * kLanes, sum[r][v]);
}

// R rows from `row` on of one tile, into out [R, kTile].
template <int R>
void tile_float32(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  Tile<R, F> sum;
  clear<R>(sum);
  const float* w = (const float*)tile;
  const float* in = (const float*)x.data + int64_t(row) * x.width;
  for (int i = 0; i < weight.inputs; ++i, w += kTile) {
    fetch(ahead, kTile * sizeof(float));
    for (int r = 0; r < R; ++r) {
      const F value = set(in[int64_t(r) * x.width + i]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(load(w + v * kLanes), value, sum[r][v]);
    }
  }
  store_sums<R>(sum, out);
}

template <int R>
void tile_bfloat16(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  Tile<R, F> sum;
  clear<R>(sum);
  const uint16_t* in = (const uint16_t*)x.data + int64_t(row) * x.width;
  for (int i = 0; i < weight.inputs; i += 2, tile += 4 * kTile) {
    fetch(ahead, 4 * kTile);
    for (int r = 0; r < R; ++r) {
      const Bytes pair = spread(in + int64_t(r) * x.width + i);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = dot2(sum[r][v], load_bytes(tile + v * kBytes), pair);
    }
  }
  store_sums<R>(sum, out);
}

template <int R>
void tile_int8(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  Tile<R, F> sum;
  clear<R>(sum);
  const int groups = weight.inputs / kGroup, stride = x.width / kGroup;
  const int8_t* in = (const int8_t*)x.data + int64_t(row) * x.width;
  const float* scales = x.scales + int64_t(row) * stride;
  const int32_t* sums = x.sums + int64_t(row) * stride;
  for (int g = 0; g < groups; ++g, tile += 2 * kTile + kTile * kGroup) {
    const uint8_t* weights = tile + 2 * kTile;
    Tile<R, I> dots;
    for (int r = 0; r < R; ++r)
      for (I& dot : dots[r]) dot = iset(kUnsignedWeights ? -128 * sums[int64_t(r) * stride + g] : 0);
    fetch(ahead, 2 * kTile + kTile * kGroup);
#pragma GCC unroll 8
    for (int j = 0; j < kGroup / 4; ++j)
      for (int r = 0; r < R; ++r) {
        const Bytes four = spread(in + int64_t(r) * x.width + g * kGroup + 4 * j);
        for (int v = 0; v < kVectors; ++v)
          dots[r][v] = dot4(dots[r][v], load_bytes(weights + 4 * kTile * j + v * kBytes), four);
      }
    for (int r = 0; r < R; ++r) {
      const F scale = set(scales[int64_t(r) * stride + g]);
      for (int v = 0; v < kVectors; ++v)
        sum[r][v] = fma(to_float(dots[r][v]), mul(load_half((const uint16_t*)tile + v * kLanes), scale), sum[r][v]);
    }
  }
  store_sums<R>(sum, out);
}

template <int R>
void tile_int4(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  Tile<R, F> sum;
  clear<R>(sum);
  const int groups = weight.inputs / kGroup, stride = x.width / kGroup;
  const int8_t* in = (const int8_t*)x.data + int64_t(row) * x.width;
  const float* scales = x.scales + int64_t(row) * stride;
  const int32_t* sums = x.sums + int64_t(row) * stride;
  for (int g = 0; g < groups; ++g, tile += 4 * kTile + kTile * kGroup / 2) {
    const uint8_t* weights = tile + 4 * kTile;
    const uint16_t* half = (const uint16_t*)tile;
    Tile<R, I> dots;
    for (auto& row : dots)
      for (I& dot : row) dot = iset(0);
    fetch(ahead, 4 * kTile + kTile * kGroup / 2);
#pragma GCC unroll 4
    for (int j = 0; j < kGroup / 8; ++j)
      for (int r = 0; r < R; ++r) {
        const int8_t* at = in + int64_t(r) * x.width + g * kGroup + 4 * j;
        const Bytes low = spread(at), high = spread(at + kGroup / 2);
        for (int v = 0; v < kVectors; ++v) {
          const Bytes pairs = load_bytes(weights + 4 * kTile * j + v * kBytes);
          dots[r][v] = dot4_unsigned(dot4_unsigned(dots[r][v], low_nibbles(pairs), low), high_nibbles(pairs), high);
        }
      }
    for (int r = 0; r < R; ++r) {
      const F scale = set(scales[int64_t(r) * stride + g]);
      const F total = mul(scale, set(float(sums[int64_t(r) * stride + g])));
      for (int v = 0; v < kVectors; ++v) {
        const F step = mul(load_half(half + v * kLanes), scale), low = load_half(half + kTile + v * kLanes);
        sum[r][v] = fma(low, total, fma(to_float(dots[r][v]), step, sum[r][v]));
      }
    }
  }
  store_sums<R>(sum, out);
}

template <int R>
void tile_rows(const Weight& weight, int tile, const Activation& x, int row, float* out, Ahead& ahead) {
  const uint8_t* bytes = weight.data + tile * weight.tile_bytes;
  switch (weight.format) {
    case Format::kFloat32: return tile_float32<R>(weight, bytes, x, row, out, ahead);
    case Format::kBfloat16: return tile_bfloat16<R>(weight, bytes, x, row, out, ahead);
    case Format::kInt8: return tile_int8<R>(weight, bytes, x, row, out, ahead);
    case Format::kInt4: return tile_int4<R>(weight, bytes, x, row, out, ahead);
  }
}

template <int R = kMaxRows>
void tile_any(int rows, const Weight& weight, int tile, const Activation& x, int row, float* out, Ahead& ahead) {
  if constexpr (R > 1)
    if (rows < R) return tile_any<R - 1>(rows, weight, tile, x, row, out, ahead);
  tile_rows<R>(weight, tile, x, row, out, ahead);
}

inline void add_bias(const float* bias, int column, float* x) {
  if (!bias) return;
  for (int i = 0; i < kTile; i += kLanes) store(x + i, add(load(x + i), load(bias + column + i)));
}

inline void linear(const LinearArgs& args, int rows, int begin, int end, Ahead& ahead) {
  float sums[kMaxRows * kTile];
  Ahead nothing{};  // for the other rows a tile is at hand
  for (int tile = begin; tile < end; ++tile)
    each_block(rows, kMaxRows, [&](int first, int last) {
      tile_any(last - first, args.weight, tile, args.x, first, sums, first ? nothing : ahead);
      for (int r = first; r < last; ++r) {
        float* out = args.out + int64_t(r) * args.weight.outputs + tile * kTile;
        add_bias(args.bias, tile * kTile, sums + (r - first) * kTile);
        std::memcpy(out, sums + (r - first) * kTile, kTile * sizeof(float));
      }
    });
}

// Tile t of the result is activation(tile 2t) * tile 2t + 1.
inline void gated(const GatedArgs& args, int rows, int begin, int end, Ahead& ahead) {
  float gates[kMaxRows * kTile], ups[kMaxRows * kTile];
  Ahead nothing{};
  for (int tile = begin; tile < end; ++tile)
    each_block(rows, kMaxRows, [&](int first, int last) {
      Ahead& own = first ? nothing : ahead;
      tile_any(last - first, args.weight, 2 * tile, args.x, first, gates, own);
      tile_any(last - first, args.weight, 2 * tile + 1, args.x, first, ups, own);
      for (int r = first; r < last; ++r) {
        float *gate = gates + (r - first) * kTile, *up = ups + (r - first) * kTile;
        add_bias(args.bias, 2 * tile * kTile, gate);
        add_bias(args.bias, (2 * tile + 1) * kTile, up);
        for (int i = 0; i < kTile; i += kLanes) {
          const F g = load(gate + i);
          store(gate + i, mul(args.gate == Gate::kSilu ? silu(g) : gelu_tanh(g), load(up + i)));
        }
        store_tile(args.out, r, tile * kTile, gate);
      }
    });
}

}  // namespace specserve::SPECSERVE_ISA
