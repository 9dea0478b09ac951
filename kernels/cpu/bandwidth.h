// How fast memory can be read: what a step that reads every weight once cannot beat. Knows no kernels.
#pragma once

#include <cstdint>

#include "team.h"

namespace specserve {

// Bytes a second at which the team reads `memory`, which it first fills: the best of several passes. `bytes` is many
// times what the caches hold; `memory` begins at a multiple of 64.
double read_bandwidth(Team& team, uint8_t* memory, int64_t bytes, int passes);

}  // namespace specserve
