// Rows times one tile of packed weights. Every row's sums run in the order of the inputs, so its bits do not depend on the
// rows beside it.
#pragma once

#include "args.h"
#include "rowwise.h"

namespace specserve::SPECSERVE_ISA {

constexpr int kVectors = kTile / kLanes;  // of the outputs of a tile
constexpr int kBytes = 4 * kLanes;        // of a vector
static_assert(kVectors % kIntVectors == 0 && kMaxRows <= kMaxIntRows);

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

// What R rows of quantized activations hold of a group of inputs. One address for four rows, which lie one, two and three
// widths further: an instruction finds its operand by itself, and few registers are taken.
template <int R>
class Quantized {
 public:
  Quantized(const Activation& x, int row)
      : scales_(x.scales + int64_t(row) * (x.width / kGroup)),
        sums_(x.sums + int64_t(row) * (x.width / kGroup)),
        groups_(x.width / kGroup),
        width_(x.width),
        thrice_(3 * width_) {
    for (int r = 0; r < R; r += 4) numbers_[r / 4] = (const int8_t*)x.data + (row + r) * width_;
  }
  void next_group() {
    for (const int8_t*& some : numbers_) some += kGroup;
    ++scales_;
    ++sums_;
  }
  // The same, as a compiler sees it for the first time: what it would keep of it takes the registers of sums.
  Quantized anew() const {
    Quantized same = *this;
    for (const int8_t*& some : same.numbers_) asm("" : "+r"(some));
    asm("" : "+r"(same.width_), "+r"(same.thrice_), "+r"(same.scales_));
    return same;
  }
  const int8_t* at(int r) const { return numbers_[r / 4] + (r % 4 == 3 ? thrice_ : r % 4 * width_); }
  Bytes four(int r, int j) const { return spread(at(r) + 4 * j); }
  F scale(int r) const { return set(scales_[r * groups_]); }
  int32_t sum(int r) const { return sums_[r * groups_]; }
  int32_t offset(int r) const { return -128 * sum(r); }  // weights are stored as w + 128

 private:
  const int8_t* numbers_[(R + 3) / 4];
  const float* scales_;
  const int32_t* sums_;
  int64_t groups_, width_, thrice_;
};

// Integers are asked for as far as the cache behind the innermost: they are soon computed, and so many requests of the
// innermost one would hold up what is read now.
template <int R>
void tile_int8(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  Tile<R, F> sum;
  clear<R>(sum);
  Quantized<R> rows(x, row);
  for (int g = 0; g < weight.inputs / kGroup; ++g, tile += 2 * kTile + kTile * kGroup, rows.next_group()) {
    const uint8_t* weights = tile + 2 * kTile;
    fetch<false>(ahead, 2 * kTile + kTile * kGroup);
    for (int first = 0; first < kVectors; first += kIntVectors) {
      const Quantized<R> in = rows.anew();
      I dots[R][kIntVectors];
      for (int r = 0; r < R; ++r)
        for (I& dot : dots[r]) dot = iset(in.offset(r));
#pragma GCC unroll 8
      for (int j = 0; j < kGroup / 4; ++j) {
        Bytes some[kIntVectors];
        for (int v = 0; v < kIntVectors; ++v) some[v] = load_bytes(weights + 4 * kTile * j + (first + v) * kBytes);
        for (int r = 0; r < R; ++r) {
          const Bytes four = in.four(r, j);
          for (int v = 0; v < kIntVectors; ++v) dots[r][v] = dot4(dots[r][v], some[v], four);
        }
      }
      for (int v = 0; v < kIntVectors; ++v) {
        const F step = load_half((const uint16_t*)tile + (first + v) * kLanes);
        for (int r = 0; r < R; ++r) {
          F& total = sum[r][first + v];
          total = fma(to_float(dots[r][v]), mul(step, in.scale(r)), total);
        }
      }
    }
  }
  store_sums<R>(sum, out);
}

template <int R>
void tile_int4(const Weight& weight, const uint8_t* tile, const Activation& x, int row, float* out, Ahead& ahead) {
  Tile<R, F> sum;
  clear<R>(sum);
  Quantized<R> rows(x, row);
  for (int g = 0; g < weight.inputs / kGroup; ++g, tile += 4 * kTile + kTile * kGroup / 2, rows.next_group()) {
    const uint8_t* weights = tile + 4 * kTile;
    const uint16_t* half = (const uint16_t*)tile;
    fetch<false>(ahead, 4 * kTile + kTile * kGroup / 2);
    for (int first = 0; first < kVectors; first += kIntVectors) {
      const Quantized<R> in = rows.anew();
      I dots[R][kIntVectors];
      for (auto& row : dots)
        for (I& dot : row) dot = iset(0);
#pragma GCC unroll 4
      for (int j = 0; j < kGroup / 8; ++j) {
        Bytes pairs[kIntVectors];
        for (int v = 0; v < kIntVectors; ++v) pairs[v] = load_bytes(weights + 4 * kTile * j + (first + v) * kBytes);
        for (int r = 0; r < R; ++r) {
          const Bytes low = in.four(r, j), high = in.four(r, j + kGroup / 8);
          for (int v = 0; v < kIntVectors; ++v)
            dots[r][v] = dot_nibbles(dot_nibbles(dots[r][v], low_nibbles(pairs[v]), low), high_nibbles(pairs[v]), high);
        }
      }
      for (int v = 0; v < kIntVectors; ++v) {
        const F step = load_half(half + (first + v) * kLanes), low = load_half(half + kTile + (first + v) * kLanes);
        for (int r = 0; r < R; ++r) {
          const F scale = in.scale(r), all = mul(scale, set(float(in.sum(r))));
          F& total = sum[r][first + v];
          total = fma(low, all, fma(to_float(whole(dots[r][v])), mul(step, scale), total));
        }
      }
    }
  }
  store_sums<R>(sum, out);
}

template <int R>
void tile_rows(const Weight& weight, int tile, const Activation& x, int row, float* out, Ahead& ahead) {
  const uint8_t* bytes = weight.data + tile * weight.tile_bytes;
  switch (weight.format) {
    case Format::kFloat32:
      if constexpr (R <= kMaxRows) tile_float32<R>(weight, bytes, x, row, out, ahead);
      return;
    case Format::kBfloat16:
      if constexpr (R <= kMaxRows) tile_bfloat16<R>(weight, bytes, x, row, out, ahead);
      return;
    case Format::kInt8: return tile_int8<R>(weight, bytes, x, row, out, ahead);
    case Format::kInt4: return tile_int4<R>(weight, bytes, x, row, out, ahead);
  }
}

template <int R = kMaxIntRows>
void tile_any(int rows, const Weight& weight, int tile, const Activation& x, int row, float* out, Ahead& ahead) {
  if constexpr (R > 1)
    if (rows < R) return tile_any<R - 1>(rows, weight, tile, x, row, out, ahead);
  tile_rows<R>(weight, tile, x, row, out, ahead);
}

// Of so many rows those that share a tile's way through the registers.
inline int most_rows(Format format, int rows) {
  return format == Format::kInt8 ? most_int8_rows(rows) : format == Format::kInt4 ? kMaxIntRows : kMaxRows;
}

inline void add_bias(const float* bias, int column, float* x) {
  if (!bias) return;
  for (int i = 0; i < kTile; i += kLanes) store(x + i, add(load(x + i), load(bias + column + i)));
}

}  // namespace specserve::SPECSERVE_ISA
