// A persistent pool of threads that runs one job at a time: it spins for a moment between jobs and then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace specserve {

// What threads do together. `run` gets the thread's index. If it does not need all, its caller goes on when its own call
// returns: a thread that has no core at the moment calls it late, or not at all, and must then find nothing to do.
// `meanwhile`, if there is one, is for the time until the next job: all threads but the caller's call it, with their index
// and 0, 1, 2 and so on, while it says that there is more to do. Its calls are short. Nothing of a job is still running
// after a later one that needs all.
struct Job {
  std::function<void(int thread)> run;
  bool needs_all = true;
  std::function<bool(int thread, int turn)> meanwhile = nullptr;
};

// Spins for a moment, then lets others have the core: it may be needed by the thread that is waited for.
class Wait {
 public:
  void once() {
    if (++turns_ < kSpins)
      pause();
    else
      std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 4096;
  static void pause();
  int turns_ = 0;
};

class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // at least 1; the calling thread is one of them
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Where threads count up what they have done, each in a cache line of its own of the 64 at `pulse`, which outlives the
  // pool. Null: nobody watches.
  void set_pulse(volatile uint64_t* pulse) { pulse_ = pulse; }
  void beat(int thread) const {
    if (!pulse_) return;
    volatile uint64_t& count = pulse_[thread % 64 * 8];
    count = count + 1;
  }

  // Whether this process was forked since: the threads are the parent's, and who waits for them here waits for ever.
  bool is_orphaned() const;

  // Runs the job, which must not throw. Any thread may call this, `start` and `finish`: there is one job at a time, and what
  // another thread has started is completed first. Throws where the pool is orphaned, as `start` does.
  void run(Job job);

  // Lets the other threads begin with a job that does not need all. The caller's own part is left to `finish`, or to whoever
  // wants the pool before that.
  std::shared_ptr<const Job> start(Job job);

  // Returns once a job that was started is complete; whether this call did the caller's part of it.
  bool finish(const std::shared_ptr<const Job>& job);

 private:
  std::shared_ptr<const Job> begin(Job job);
  void complete_started();
  void barrier();
  void work(int index);
  bool await(unsigned seen);

  const int threads_;
  volatile uint64_t* pulse_ = nullptr;
  std::shared_ptr<const Job> job_;      // under mutex_
  std::shared_ptr<const Job> started_;  // and not complete, under one_caller_
  alignas(64) std::atomic<unsigned> job_number_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  int sleeping_ = 0;  // under mutex_
  std::atomic<bool> stopping_{false};
  std::mutex one_caller_, mutex_;
  std::unique_ptr<std::condition_variable> wake_ = std::make_unique<std::condition_variable>();
  const int process_;
  std::vector<std::thread> workers_;
};

inline void Wait::pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace specserve
