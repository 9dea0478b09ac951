// The kernels for AVX2.
#define SPECSERVE_ISA avx2
#include "simd_avx2.h"
// after the lanes it computes with
#include "attention.h"
#include "linear.h"
#include "rotate.h"
#include "rowwise.h"
#include "sample.h"
#include "score.h"

namespace specserve {
const Kernels kAvx2 = {"avx2",      avx2::linear,  avx2::gated,    avx2::embed,   avx2::norm, avx2::collect, avx2::rotate,
                    avx2::attention, avx2::activate, avx2::softcap, avx2::sample,
                    avx2::score,    avx2::argmax};
}
