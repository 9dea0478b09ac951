// Rows times packed weights, a tile of outputs at a time: a tile is read from memory once, whatever the number of rows.
// Every row's sums run in the order of the inputs, so its bits do not depend on the rows beside it.
#pragma once

#include "args.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

template <int R>
void store_sums(const F (&sum)[R][2], float* out) {
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half) store(out + r * kTile + half * kLanes, sum[r][half]);
}

// R rows from `row` on of one tile, into out [R, kTile].
template <int R>
void tile_float32(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  F sum[R][2];
  for (auto& s : sum) s[0] = s[1] = zero();
  const float* w = (const float*)tile;
  const float* in = (const float*)x.data + int64_t(row) * x.width;
  for (int i = 0; i < weight.inputs; ++i, w += kTile) {
    const F left = load(w), right = load(w + kLanes);
    fetch(ahead, kTile * sizeof(float));
    for (int r = 0; r < R; ++r) {
      const F value = set(in[int64_t(r) * x.width + i]);
      sum[r][0] = fma(left, value, sum[r][0]);
      sum[r][1] = fma(right, value, sum[r][1]);
    }
  }
  store_sums(sum, out);
}

template <int R>
void tile_bfloat16(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  F sum[R][2];
  for (auto& s : sum) s[0] = s[1] = zero();
  const uint16_t* in = (const uint16_t*)x.data + int64_t(row) * x.width;
  for (int i = 0; i < weight.inputs; i += 2, tile += 128) {
    const Bytes left = load_bytes(tile), right = load_bytes(tile + 64);
    fetch(ahead, 128);
    for (int r = 0; r < R; ++r) {
      const Bytes pair = spread(in + int64_t(r) * x.width + i);
      sum[r][0] = dot2(sum[r][0], left, pair);
      sum[r][1] = dot2(sum[r][1], right, pair);
    }
  }
  store_sums(sum, out);
}

template <int R>
void tile_int8(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  F sum[R][2];
  for (auto& s : sum) s[0] = s[1] = zero();
  const int groups = weight.inputs / kGroup, stride = x.width / kGroup;
  const int8_t* in = (const int8_t*)x.data + int64_t(row) * x.width;
  const float* scales = x.scales + int64_t(row) * stride;
  const int32_t* sums = x.sums + int64_t(row) * stride;
  for (int g = 0; g < groups; ++g, tile += 64 + kTile * kGroup) {
    I dots[R][2];
    for (int r = 0; r < R; ++r)
      dots[r][0] = dots[r][1] = iset(kUnsignedWeights ? -128 * sums[int64_t(r) * stride + g] : 0);
    fetch(ahead, 64 + kTile * kGroup);
#pragma GCC unroll 8
    for (int j = 0; j < kGroup / 4; ++j) {
      const Bytes left = load_bytes(tile + 64 + 128 * j), right = load_bytes(tile + 128 + 128 * j);
      for (int r = 0; r < R; ++r) {
        const Bytes four = spread(in + int64_t(r) * x.width + g * kGroup + 4 * j);
        dots[r][0] = dot4(dots[r][0], left, four);
        dots[r][1] = dot4(dots[r][1], right, four);
      }
    }
    const F left = load_half((const uint16_t*)tile), right = load_half((const uint16_t*)tile + kLanes);
    for (int r = 0; r < R; ++r) {
      const F scale = set(scales[int64_t(r) * stride + g]);
      sum[r][0] = fma(to_float(dots[r][0]), mul(left, scale), sum[r][0]);
      sum[r][1] = fma(to_float(dots[r][1]), mul(right, scale), sum[r][1]);
    }
  }
  store_sums(sum, out);
}

template <int R>
void tile_int4(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  F sum[R][2];
  for (auto& s : sum) s[0] = s[1] = zero();
  const int groups = weight.inputs / kGroup, stride = x.width / kGroup;
  const int8_t* in = (const int8_t*)x.data + int64_t(row) * x.width;
  const float* scales = x.scales + int64_t(row) * stride;
  const int32_t* sums = x.sums + int64_t(row) * stride;
  for (int g = 0; g < groups; ++g, tile += 128 + kTile * kGroup / 2) {
    I dots[R][2];
    for (auto& d : dots) d[0] = d[1] = iset(0);
    fetch(ahead, 128 + kTile * kGroup / 2);
#pragma GCC unroll 4
    for (int j = 0; j < kGroup / 8; ++j) {
      const Bytes left = load_bytes(tile + 128 + 128 * j), right = load_bytes(tile + 192 + 128 * j);
      const Bytes left_low = low_nibbles(left), left_high = high_nibbles(left);
      const Bytes right_low = low_nibbles(right), right_high = high_nibbles(right);
      for (int r = 0; r < R; ++r) {
        const int8_t* at = in + int64_t(r) * x.width + g * kGroup + 4 * j;
        const Bytes low = spread(at), high = spread(at + kGroup / 2);
        dots[r][0] = dot4_unsigned(dot4_unsigned(dots[r][0], left_low, low), left_high, high);
        dots[r][1] = dot4_unsigned(dot4_unsigned(dots[r][1], right_low, low), right_high, high);
      }
    }
    const uint16_t* half = (const uint16_t*)tile;
    const F left = load_half(half), right = load_half(half + kLanes);
    const F left_min = load_half(half + 2 * kLanes), right_min = load_half(half + 3 * kLanes);
    for (int r = 0; r < R; ++r) {
      const F scale = set(scales[int64_t(r) * stride + g]);
      const F total = mul(scale, set(float(sums[int64_t(r) * stride + g])));
      sum[r][0] = fma(left_min, total, fma(to_float(dots[r][0]), mul(left, scale), sum[r][0]));
      sum[r][1] = fma(right_min, total, fma(to_float(dots[r][1]), mul(right, scale), sum[r][1]));
    }
  }
  store_sums(sum, out);
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
