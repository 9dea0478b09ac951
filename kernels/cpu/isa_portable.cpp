// The kernels for any machine.
#define SPECSERVE_ISA portable
#include "simd_portable.h"
// after the lanes it computes with
#include "attention.h"
#include "linear.h"
#include "rotate.h"
#include "rowwise.h"
#include "sample.h"
#include "score.h"

namespace specserve {
const Kernels kPortable = {"portable",      portable::linear,  portable::gated,    portable::embed,   portable::norm, portable::collect, portable::rotate,
                    portable::attention, portable::activate, portable::softcap, portable::sample,
                    portable::score,    portable::argmax};
}
