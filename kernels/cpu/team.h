// A persistent team of threads that runs one job at a time: it spins for a moment between jobs and then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace specserve {

// What threads do together. `run` gets the thread's index. `meanwhile`, if there is one, is for the time until the next
// job: all threads but the caller's call it, with their index and 0, 1, 2 and so on, while it says that there is more to
// do. Its calls are short; the last one may end after the job's caller has gone on, but before its next job does.
struct Job {
  std::function<void(int thread)> run;
  std::function<bool(int thread, int turn)> meanwhile = nullptr;
};

class Team {
 public:
  explicit Team(int threads);  // at least 1; the calling thread is one of them
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // Returns when all threads have run the job, which must not throw. One caller at a time.
  void run(Job job);

  // Within a job: waits until every thread has come here.
  void barrier();

 private:
  void work(int index);
  bool await(unsigned seen);

  const int threads_;
  std::shared_ptr<const Job> job_;  // changes only while no thread is in a job
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
