// Which instruction sets' kernels this processor can run.
#pragma once

#include <vector>

#include "args.h"

namespace specserve {

// Those of this build that the processor has, the fastest first.
std::vector<const Kernels*> supported_kernels();

}  // namespace specserve
