// How fast memory can be read: what a step that reads every weight once cannot beat.
#pragma once

#include <cstdint>

#include "thread_pool.h"

namespace specserve {

// Bytes a second at which the pool reads `memory`, which it first fills: the best of several passes. `bytes` is many
// times what the caches hold; `memory` begins at a multiple of 64.
double read_bandwidth(ThreadPool& pool, uint8_t* memory, int64_t bytes, int passes);

}  // namespace specserve
