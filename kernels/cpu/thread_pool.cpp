// Threads that wait for a job, and for each other within one.
#include "thread_pool.h"

#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <utility>

namespace specserve {
namespace {

constexpr std::chrono::microseconds kSpin{200};  // the host's share of a step is about this long

constexpr char kOrphaned[] = "these kernels were made before a fork, and their threads are not in this process";

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(threads), process_(getpid()) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  if (is_orphaned()) {
    for (std::thread& worker : workers_) worker.detach();
    (void)wake_.release();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    job_number_.fetch_add(1);
  }
  wake_->notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::is_orphaned() const { return getpid() != process_; }

void ThreadPool::run(Job job) {
  if (is_orphaned()) throw std::runtime_error(kOrphaned);  // before the lock, which may be another thread's
  std::lock_guard<std::mutex> only(one_caller_);
  complete_started();
  const auto shared = begin(std::move(job));
  shared->run(0);
  if (shared->needs_all) barrier();
}

std::shared_ptr<const Job> ThreadPool::start(Job job) {
  if (is_orphaned()) throw std::runtime_error(kOrphaned);
  std::lock_guard<std::mutex> only(one_caller_);
  complete_started();
  return started_ = begin(std::move(job));
}

bool ThreadPool::finish(const std::shared_ptr<const Job>& job) {
  if (is_orphaned()) return false;  // what the parent started is the parent's
  std::lock_guard<std::mutex> only(one_caller_);
  if (started_ != job) return false;
  complete_started();
  return true;
}

// A thread that started a job may be held up, or gone for good, before it finishes it.
void ThreadPool::complete_started() {
  if (const auto job = std::exchange(started_, nullptr)) job->run(0);
}

std::shared_ptr<const Job> ThreadPool::begin(Job job) {
  auto shared = std::make_shared<const Job>(std::move(job));
  std::lock_guard<std::mutex> lock(mutex_);  // whoever was about to sleep is asleep now
  job_ = shared;
  job_number_.fetch_add(1);
  if (sleeping_ > 0) wake_->notify_all();
  return shared;
}

void ThreadPool::barrier() {
  const unsigned phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_release);
    return;
  }
  for (Wait wait; phase_.load(std::memory_order_acquire) == phase;) wait.once();
}

// Returns when there is a job after number `seen`; false: the pool is stopping.
bool ThreadPool::await(unsigned seen) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  while (std::chrono::steady_clock::now() < until) {
    Wait wait;
    for (int i = 0; i < 32; ++i, wait.once())
      if (job_number_.load(std::memory_order_acquire) != seen) return !stopping_;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  ++sleeping_;
  wake_->wait(lock, [&] { return job_number_.load() != seen; });
  --sleeping_;
  return !stopping_;
}

void ThreadPool::work(int index) {
  for (unsigned seen = 0; await(seen);) {
    std::shared_ptr<const Job> job;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job = job_;
      seen = job_number_;
    }
    job->run(index);
    if (job->needs_all) barrier();
    for (int turn = 0; job->meanwhile && job_number_.load(std::memory_order_acquire) == seen; ++turn)
      if (!job->meanwhile(index, turn)) break;
  }
}

}  // namespace specserve
