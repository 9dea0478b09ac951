// A persistent team of threads that runs one job at a time: it spins for a moment between jobs and then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace specserve {

class Team {
 public:
  explicit Team(int threads);  // at least 1; the calling thread is one of them
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // Every thread calls job(its index); returns when all have returned. One caller at a time; the job must not throw.
  void run(const std::function<void(int)>& job);

  // Within a job: waits until every thread has come here.
  void barrier();

 private:
  void work(int index);
  bool await(unsigned seen);

  const int threads_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<unsigned> job_number_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
  std::mutex one_caller_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace specserve
