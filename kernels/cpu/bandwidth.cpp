// Reads memory as fast as plain loads can: eight cache lines in flight, each into a sum of its own, and prefetches.
#include "bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace specserve {
namespace {

constexpr int kLines = 8;
constexpr int64_t kStep = kLines * 64, kAhead = 2048;
typedef uint64_t Line __attribute__((vector_size(64), may_alias));
using Sum = uint64_t (*)(const uint8_t* p, const uint8_t* end);

inline __attribute__((always_inline)) uint64_t sum_lines(const uint8_t* p, const uint8_t* end) {
  Line sums[kLines] = {};
  for (; p < end; p += kStep)
    for (int i = 0; i < kLines; ++i) {
      __builtin_prefetch(p + kAhead + i * 64, 0, 3);
      sums[i] += *(const Line*)(p + i * 64);
    }
  for (int i = 1; i < kLines; ++i) sums[0] += sums[i];
  uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total += sums[0][i];
  return total;
}

namespace portable {
uint64_t sum(const uint8_t* p, const uint8_t* end) { return sum_lines(p, end); }
}  // namespace portable

#ifdef SPECSERVE_X86
namespace avx2 {
__attribute__((target("avx2"))) uint64_t sum(const uint8_t* p, const uint8_t* end) { return sum_lines(p, end); }
}  // namespace avx2

namespace avx512 {
__attribute__((target("avx512f"))) uint64_t sum(const uint8_t* p, const uint8_t* end) { return sum_lines(p, end); }
}  // namespace avx512
#endif

Sum widest() {
#ifdef SPECSERVE_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return avx512::sum;
  if (__builtin_cpu_supports("avx2")) return avx2::sum;
#endif
  return portable::sum;
}

}  // namespace

double read_bandwidth(ThreadPool& pool, uint8_t* memory, int64_t bytes, int passes) {
  using Clock = std::chrono::steady_clock;
  const int64_t share = bytes / pool.threads() / kStep * kStep;
  const Sum sum = widest();
  std::atomic<uint64_t> seen{0};
  pool.run({[&](int thread) { std::memset(memory + thread * share, thread + 1, share); }});
  double best = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const Clock::time_point begun = Clock::now();
    pool.run({[&](int thread) { seen += sum(memory + thread * share, memory + (thread + 1) * share); }});
    const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
    best = std::max(best, double(share * pool.threads()) / seconds);
  }
  [[maybe_unused]] volatile uint64_t needed = seen;  // else the compiler might leave the sums out
  return best;
}

}  // namespace specserve
