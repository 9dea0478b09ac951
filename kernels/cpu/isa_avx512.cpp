// The kernels for AVX-512.
#define SPECSERVE_ISA avx512
#include "simd_avx512.h"
// after the lanes it computes with
#include "attention.h"
#include "linear.h"
#include "rotate.h"
#include "rowwise.h"
#include "sample.h"
#include "score.h"

namespace specserve {
const Kernels kAvx512 = {"avx512",      avx512::linear,  avx512::gated,    avx512::embed,   avx512::norm, avx512::collect, avx512::rotate,
                    avx512::attention, avx512::activate, avx512::softcap, avx512::sample,
                    avx512::score,    avx512::argmax};
}
