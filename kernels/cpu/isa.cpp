// Recognises the instruction sets of this processor. Compiled for any machine.
#include "isa.h"

namespace specserve {

namespace portable { extern const Kernels kKernels; }
#ifdef SPECSERVE_X86
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
#endif
#ifdef SPECSERVE_NARROW
namespace narrow { extern const Kernels kKernels; }
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
  if (has_avx2) found.push_back(&avx2::kKernels);
#endif
  found.push_back(&portable::kKernels);
#ifdef SPECSERVE_NARROW
  found.push_back(&narrow::kKernels);
#endif
  return found;
}

}  // namespace specserve
