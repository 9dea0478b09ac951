// Recognises the instruction sets of this processor. Compiled for any machine.
#include "isa.h"

#ifdef SPECSERVE_X86
#include <cpuid.h>
#endif

namespace specserve {

namespace portable { extern const Kernels kKernels; }
#ifdef SPECSERVE_X86
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
#endif
#ifdef SPECSERVE_AVX_VNNI
namespace avx_vnni { extern const Kernels kKernels; }
#endif
#ifdef SPECSERVE_AVX_VNNI_EVEX
namespace avx_vnni_evex { extern const Kernels kKernels; }
#endif

#ifdef SPECSERVE_AVX_VNNI
// Whether the processor has it; that the system keeps its registers is known of AVX2. Older compilers do not know its name.
static bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> found;
#ifdef SPECSERVE_X86
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (has_avx512 && has_avx2) found.push_back(&avx512::kKernels);
#ifdef SPECSERVE_AVX_VNNI
  if (has_avx2 && has_avx_vnni()) found.push_back(&avx_vnni::kKernels);
#endif
  if (has_avx2) found.push_back(&avx2::kKernels);
#endif
  found.push_back(&portable::kKernels);
#ifdef SPECSERVE_AVX_VNNI_EVEX
  if (has_avx512 && has_avx2) found.push_back(&avx_vnni_evex::kKernels);
#endif
  return found;
}

}  // namespace specserve
