// For a process that computes beside others and has time: it gives its core up often.
#pragma once

#include <cstdint>

namespace specserve {

// From now on whichever thread takes SIGALRM, the main one as a rule, pauses for `pause_us` after each `run_us`, both in
// microseconds: a scheduler that looks at its ticks alone would let it run for milliseconds at a time. The time between
// pauses is counted on the wall, from the end of one to the next.
void pause_often(int64_t run_us, int64_t pause_us);
void pause_no_more();

}  // namespace specserve
