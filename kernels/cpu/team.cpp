// Threads that wait for a job, and for each other within one.
#include "team.h"

#include <chrono>

namespace specserve {
namespace {

constexpr std::chrono::microseconds kSpin{200};  // the host's share of a step is about this long
constexpr int kPauses = 4096;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Team::Team(int threads) : threads_(threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    job_number_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Team::run(Job job) {
  std::lock_guard<std::mutex> only(one_caller_);
  job_ = std::make_shared<const Job>(std::move(job));
  job_number_.fetch_add(1);
  if (sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);  // whoever was about to sleep is asleep now
    wake_.notify_all();
  }
  job_->run(0);
  barrier();
}

void Team::barrier() {
  const unsigned phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_release);
    return;
  }
  for (int i = 0; phase_.load(std::memory_order_acquire) == phase; ++i) {
    if (i < kPauses)
      pause();
    else
      std::this_thread::yield();  // its core may be needed by the thread that is waited for
  }
}

// Returns when there is a job after number `seen`; false: the team is stopping.
bool Team::await(unsigned seen) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  while (std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 32; ++i) {
      if (job_number_.load(std::memory_order_acquire) != seen) return !stopping_;
      pause();
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleeping_.fetch_add(1);
  wake_.wait(lock, [&] { return job_number_.load() != seen; });
  sleeping_.fetch_sub(1);
  return !stopping_;
}

void Team::work(int index) {
  for (unsigned seen = 0; await(seen); ++seen) {
    const std::shared_ptr<const Job> job = job_;  // what it does meanwhile outlives the call
    job->run(index);
    barrier();
    for (int turn = 0; job->meanwhile && job_number_.load(std::memory_order_acquire) == seen + 1; ++turn)
      if (!job->meanwhile(index, turn)) break;
  }
}

}  // namespace specserve
