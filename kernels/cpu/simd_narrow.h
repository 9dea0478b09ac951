// Vectors of four floats in standard C++, in builds for tests only: another width than the portable kernels' must give
// the same bits.
#define SPECSERVE_LANES 4
#include "simd_portable.h"
