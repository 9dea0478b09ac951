// Judges drafts: the tokens that a target chooses, and how far each draft goes along with them.
#pragma once

#include <mutex>
#include <vector>

#include "args.h"
#include "thread_pool.h"

namespace specserve {

// With a thread pool, in memory that it keeps: so much of it costs more to ask for than to use. Any thread may call it.
class Verifier {
 public:
  Verifier(std::shared_ptr<ThreadPool> pool, const Kernels& kernels) : pool_(std::move(pool)), kernels_(kernels) {}

  void verify(const VerifyArgs& args);
  void score(const ScoreArgs& args, int count);

 private:
  // One thread's.
  struct Memory {
    std::vector<float> floats;
    std::vector<int32_t> tokens;
    std::vector<double> laws;
  };

  class Walk;

  // use(i, thread) for all below count, by whichever thread is free.
  template <class Use>
  void each(int count, Use use);

  std::shared_ptr<ThreadPool> pool_;
  const Kernels& kernels_;
  std::mutex only_;  // one caller uses these
  std::vector<Memory> memories_;
  std::vector<int> chosen_;  // by row, the token or why there is none; kUnknown while nobody has asked
};

}  // namespace specserve
