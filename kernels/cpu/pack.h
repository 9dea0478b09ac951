// The bytes of packed weights. A tile is kTile outputs by all inputs, in the order its kernel reads them:
// - float32: [inputs][kTile outputs]
// - bfloat16: [inputs / 2][kTile outputs][2]
// - int8: for each group of kGroup inputs kTile float16 scales, then [kGroup / 4][kTile outputs][4] bytes, offset by 128
// - int4: for each group kTile scales and kTile minima in float16, then [kGroup / 8][kTile outputs][4] bytes, whose low
//   nibbles are inputs 0 to 15 of the group and whose high nibbles inputs 16 to 31; weight = scale * nibble + minimum
#pragma once

#include "args.h"

namespace specserve {

int64_t tile_bytes(Format format, int inputs);

// Kind of activation that weights of a format are multiplied with.
Kind kind_of(Format format);

// Rounds `rows` [outputs, inputs] to the format, into the tiles they fill; outputs and inputs need not be padded.
void pack(Format format, const float* rows, int outputs, int inputs, uint8_t* out);

// Integers [outputs, inputs] as int8 or int4 have them, int8's offset by 128, with the scales and minima [outputs, inputs /
// kGroup] of their groups, in float16; int8 has no minima. Inputs fill whole groups, and `out` has zeros.
void pack_groups(Format format, const uint8_t* numbers, const uint16_t* scales, const uint16_t* minima, int outputs,
                 int inputs, uint8_t* out);

}  // namespace specserve
