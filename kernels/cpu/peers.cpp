#include "peers.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "thread_pool.h"

namespace specserve {
namespace {

constexpr int kTurns = 8192;              // of a Wait, before a process sleeps
constexpr timespec kLook{0, 100'000'000};  // between two looks of one that sleeps, should nobody be left to wake it

}  // namespace

// Whoever comes is either seen by who is about to sleep, or sees that somebody does.
void Meeting::meet(uint64_t number) {
  arrived(rank_).store(number, std::memory_order_seq_cst);
  if (header().sleeping.load(std::memory_order_seq_cst)) wake();
  Wait wait;
  int turns = 0;
  for (int rank = 0; rank < count_; ++rank)
    for (; !has_come(rank, number); wait.once())
      if (++turns == kTurns) return sleep_until_all_have_come(number);
}

bool Meeting::has_come(int rank, uint64_t number) const {
  return arrived(rank).load(std::memory_order_seq_cst) >= number || has_left();
}

void Meeting::sleep_until_all_have_come(uint64_t number) {
  header().sleeping.fetch_add(1, std::memory_order_seq_cst);
  for (int rank = 0; rank < count_; ++rank)
    for (;;) {
      const uint32_t seen = header().arrivals.load(std::memory_order_seq_cst);
      if (has_come(rank, number)) break;
      syscall(SYS_futex, &header().arrivals, FUTEX_WAIT, seen, &kLook, nullptr, 0);
    }
  header().sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

void Meeting::leave() {
  header().left.store(1, std::memory_order_seq_cst);
  wake();
}

void Meeting::wake() const {
  header().arrivals.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &header().arrivals, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

Peers::Peers(void* memory, int rank, int count, int64_t bytes, Gather gather)
    : memory_((uint8_t*)memory),
      meeting_(memory, rank, count),
      rank_(rank),
      count_(count),
      bytes_((bytes + 63) / 64 * 64),
      gather_(std::move(gather)) {}

int64_t Peers::size(int count, int64_t bytes) { return place_at(count, bytes, 0, 2); }

int64_t Peers::place_at(int count, int64_t bytes, int rank, int places) {
  return Meeting::size(count) + (places * count + rank) * ((bytes + 63) / 64 * 64);
}

float* Peers::place(int rank, uint64_t meeting) const {
  return (float*)(memory_ + place_at(count_, bytes_, rank, meeting & 1));
}

void Peers::meet(int64_t bytes) {
  ++meetings_;
  if (gather_) {
    if (!has_left() && !gather_(meetings_ & 1, bytes)) leave();
    return;
  }
  meeting_.meet(meetings_);
}

void Peers::sum(float* x, int64_t count) {
  const int64_t at_once = bytes_ / int64_t(sizeof(float));
  for (int64_t first = 0; first < count; first += at_once) {
    const int64_t n = std::min(at_once, count - first);
    float* some = x + first;
    std::memcpy(own(), some, n * sizeof(float));
    meet(n * sizeof(float));
    std::memcpy(some, of(0), n * sizeof(float));
    for (int rank = 1; rank < count_; ++rank) {
      const float* part = of(rank);
      for (int64_t i = 0; i < n; ++i) some[i] += part[i];
    }
  }
}

void Peers::gather(const float* x, int64_t rows, int64_t x_stride, const int64_t* widths, float* out, int64_t stride) {
  const int64_t widest = *std::max_element(widths, widths + count_), room = bytes_ / int64_t(sizeof(float));
  const int64_t columns = std::min(widest, room), at_once = std::max<int64_t>(1, room / columns);
  for (int64_t first = 0; first < rows; first += at_once)
    for (int64_t left = 0; left < widest; left += columns)
      gather_piece(x + first * x_stride, std::min(at_once, rows - first), x_stride, left, columns, widths, out + first * stride, stride);
}

// Columns [left, left + columns) of each part, where it has them.
void Peers::gather_piece(const float* x, int64_t rows, int64_t x_stride, int64_t left, int64_t columns, const int64_t* widths,
                         float* out, int64_t stride) {
  const auto width = [&](int rank) { return std::clamp<int64_t>(widths[rank] - left, 0, columns); };
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(own() + row * columns, x + row * x_stride + left, width(rank_) * sizeof(float));
  meet(rows * columns * sizeof(float));
  for (int64_t row = 0; row < rows; ++row) {
    float* to = out + row * stride + left;
    for (int rank = 0; rank < count_; to += widths[rank++])
      std::memcpy(to, of(rank) + row * columns, width(rank) * sizeof(float));
  }
}

void Peers::any(std::atomic<bool>* flags, int64_t n) {
  for (int64_t first = 0; first < n; first += bytes_) {
    const int64_t count = std::min(bytes_, n - first);
    uint8_t* mine = (uint8_t*)own();
    for (int64_t i = 0; i < count; ++i) mine[i] = flags[first + i].load(std::memory_order_relaxed);
    meet(count);
    for (int rank = 0; rank < count_; ++rank)
      for (int64_t i = 0; i < count; ++i)
        if (((const uint8_t*)of(rank))[i]) flags[first + i].store(true, std::memory_order_relaxed);
  }
}

}  // namespace specserve
