// Rounds weights to their format and lays them out. Runs once per model, so it is plain code.
#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace specserve {
namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint16_t to_bfloat(float x) {
  const uint32_t bits = bits_of(x);
  return std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// To nearest even. Adding and taking away a number whose last place is that of the result rounds below the normal range.
uint16_t to_half(float x) {
  const uint16_t sign = uint16_t(bits_of(x) >> 16 & 0x8000);
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 6.103515625e-5f) return sign | uint16_t(bits_of(magnitude + 0.5f) - bits_of(0.5f));
  const uint32_t bits = bits_of(magnitude);
  return sign | uint16_t((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

float from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  if ((h & 0x7c00) == 0x7c00) return float_of(sign | 0x7f800000 | uint32_t(h & 0x3ff) << 13);
  return float_of(sign | uint32_t(h & 0x7fff) << 13) * float_of(0x77800000);
}

// Scale of one group as it is stored, and integers of at most 127, offset by 128, that it turns into the weights.
uint16_t round_int8(const float* x, uint8_t* out) {
  float peak = 0;
  for (int i = 0; i < kGroup; ++i) peak = std::max(peak, std::fabs(x[i]));
  const uint16_t stored = to_half(peak / 127.0f);
  const float scale = from_half(stored);
  for (int i = 0; i < kGroup; ++i) {
    const float n = scale > 0 ? std::nearbyint(x[i] / scale) : 0.0f;
    out[i] = uint8_t(int(std::clamp(n, -127.0f, 127.0f)) + 128);
  }
  return stored;
}

// Scale and offset of one group as they are stored: weight = scale * n + offset, n from 0 to 15.
struct Grid {
  uint16_t scale, offset;
  float at(int n) const { return from_half(scale) * float(n) + from_half(offset); }
  int nearest(float x) const {
    const float step = from_half(scale);
    return step == 0 ? 0 : int(std::clamp(std::nearbyint((x - from_half(offset)) / step), 0.0f, 15.0f));
  }
  // Whether the group lies on it, but for the rounding of a product and a sum.
  bool holds(const float* x, float tolerance) const {
    for (int i = 0; i < kGroup; ++i)
      if (!(std::fabs(at(nearest(x[i])) - x[i]) <= tolerance)) return false;
    return true;
  }
};

// The grid that a group was rounded to before, as GGUF's Q4_0 and Q4_1 are: a float16 step and one of its ends in float16,
// the upper end if the step is negative. Otherwise the one that spans the group.
Grid find_grid(const float* x) {
  const auto [lowest, highest] = std::minmax_element(x, x + kGroup);
  const float low = *lowest, high = *highest, tolerance = 4e-7f * std::max(std::fabs(low), std::fabs(high));
  for (int steps = 15; steps > 0; --steps) {
    const float step = (high - low) / float(steps);
    for (const Grid& grid : {Grid{to_half(step), to_half(low)}, Grid{to_half(-step), to_half(high)}})
      if (grid.holds(x, tolerance)) return grid;
  }
  return {to_half((high - low) / 15.0f), to_half(low)};
}

// One output's group into its place among those of a tile.
void put_int8(uint16_t scale, const uint8_t* n, int lane, uint8_t* group) {
  ((uint16_t*)group)[lane] = scale;
  for (int j = 0; j < kGroup; ++j) group[2 * kTile + j / 4 * 4 * kTile + lane * 4 + j % 4] = n[j];
}

void put_int4(uint16_t scale, uint16_t minimum, const uint8_t* n, int lane, uint8_t* group) {
  ((uint16_t*)group)[lane] = scale;
  ((uint16_t*)group)[kTile + lane] = minimum;
  for (int j = 0; j < kGroup / 2; ++j)
    group[4 * kTile + j / 4 * 4 * kTile + lane * 4 + j % 4] = uint8_t(n[j] | n[j + kGroup / 2] << 4);
}

// Bytes of a group of a tile.
int64_t group_bytes(Format format) { return tile_bytes(format, kGroup); }

// One output's numbers into its place in a tile.
void place(Format format, const float* x, int inputs, int lane, uint8_t* tile) {
  if (format == Format::kFloat32) {
    for (int i = 0; i < inputs; ++i) ((float*)tile)[int64_t(i) * kTile + lane] = x[i];
  } else if (format == Format::kBfloat16) {
    uint16_t* to = (uint16_t*)tile;
    for (int i = 0; i < inputs; ++i) to[int64_t(i / 2) * kTile * 2 + lane * 2 + i % 2] = to_bfloat(x[i]);
  } else {
    uint8_t n[kGroup];
    for (int i = 0; i < inputs; i += kGroup, tile += group_bytes(format)) {
      if (format == Format::kInt8) {
        const uint16_t scale = round_int8(x + i, n);
        put_int8(scale, n, lane, tile);
      } else {
        const Grid grid = find_grid(x + i);
        for (int j = 0; j < kGroup; ++j) n[j] = uint8_t(grid.nearest(x[i + j]));
        put_int4(grid.scale, grid.offset, n, lane, tile);
      }
    }
  }
}

}  // namespace

int64_t tile_bytes(Format format, int inputs) {
  const int64_t n = int64_t(kTile) * padded(inputs);
  switch (format) {
    case Format::kFloat32: return 4 * n;
    case Format::kBfloat16: return 2 * n;
    case Format::kInt8: return n + 2 * n / kGroup;
    case Format::kInt4: return n / 2 + 4 * n / kGroup;
  }
  return 0;
}

Kind kind_of(Format format) {
  if (format == Format::kFloat32) return Kind::kFloat32;
  return format == Format::kBfloat16 ? Kind::kBfloat16 : Kind::kInt8;
}

void pack(Format format, const float* rows, int outputs, int inputs, uint8_t* out) {
  std::vector<float> row(padded(inputs));
  for (int o = 0; o < padded(outputs); ++o) {
    if (o < outputs)
      std::copy(rows + int64_t(o) * inputs, rows + int64_t(o + 1) * inputs, row.begin());
    else
      std::fill(row.begin(), row.end(), 0.0f);
    place(format, row.data(), int(padded(inputs)), o % kTile, out + o / kTile * tile_bytes(format, inputs));
  }
}

void pack_groups(Format format, const uint8_t* numbers, const uint16_t* scales, const uint16_t* minima, int outputs,
                 int inputs, uint8_t* out) {
  const int groups = inputs / kGroup;
  for (int64_t o = 0; o < outputs; ++o) {
    uint8_t* group = out + o / kTile * tile_bytes(format, inputs);
    for (int64_t at = o * groups; at < (o + 1) * groups; ++at, group += group_bytes(format)) {
      const uint8_t* n = numbers + at * kGroup;
      if (format == Format::kInt8)
        put_int8(scales[at], n, int(o % kTile), group);
      else
        put_int4(scales[at], minima[at], n, int(o % kTile), group);
    }
  }
}

}  // namespace specserve
