// The kernels of AVX-VNNI with its one instruction in the encoding of AVX-512, in builds for tests only: most machines that
// run tests have the latter and lack the former.
#include "simd_avx_vnni.h"
