// A handler may call nanosleep and setitimer: both are system calls that keep nothing of the process's own.
#include "pauses.h"

#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <sys/time.h>
#include <time.h>

#include <cerrno>
#endif

namespace specserve {

#if defined(__unix__) || defined(__APPLE__)
namespace {

constexpr int64_t kMillion = 1'000'000;
volatile sig_atomic_t is_on = 0;
int64_t run_for, pause_for;  // written while the alarm is off

void alarm_in(int64_t us) {
  const itimerval once{{0, 0}, {time_t(us / kMillion), suseconds_t(us % kMillion)}};
  setitimer(ITIMER_REAL, &once, nullptr);
}

void pause_now(int) {
  if (!is_on) return;
  const int before = errno;
  const timespec time{time_t(pause_for / kMillion), long(pause_for % kMillion * 1000)};
  nanosleep(&time, nullptr);
  if (is_on) alarm_in(run_for);
  errno = before;
}

}  // namespace

void pause_often(int64_t run_us, int64_t pause_us) {
  pause_no_more();
  run_for = run_us;
  pause_for = pause_us;
  struct sigaction action {};
  action.sa_handler = pause_now;
  action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, nullptr);
  is_on = 1;
  alarm_in(run_us);
}

void pause_no_more() {
  is_on = 0;
  alarm_in(0);
}
#else
void pause_often(int64_t, int64_t) {}
void pause_no_more() {}
#endif

}  // namespace specserve
