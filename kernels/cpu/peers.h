// Processes that each compute a part of the same step, and the memory that all of them have mapped.
//
// They meet once for each sum. A part is written to this process's place, all wait for each other, and everybody adds the
// parts up in the order of the ranks: the same numbers in every process, whoever came last. There are two places each, in
// turns: who writes to one again has met all others once more, and they had read it before they came there. Processes that
// share no memory each have their own, and meet by a call that gathers the others' parts in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace specserve {

// Where they meet, by number: nobody goes on before all have come to the meeting of that number. Whoever waits long sleeps.
class Meeting {
 public:
  // `memory` is zeros at first, `size(count)` bytes that all have mapped, aligned to 64, and outlives this.
  Meeting(void* memory, int rank, int count) : memory_((uint8_t*)memory), rank_(rank), count_(count) {}
  static int64_t size(int count) { return sizeof(Header) + count * sizeof(Arrived); }

  // Numbers go up.
  void meet(uint64_t number);

  // Nobody waits here any more, now or ever: what is computed from then on is nothing.
  void leave();
  bool has_left() const { return header().left.load(std::memory_order_acquire); }

 private:
  struct alignas(64) Arrived {
    std::atomic<uint64_t> number;
  };
  struct alignas(64) Header {
    std::atomic<uint32_t> left;
    std::atomic<uint32_t> sleeping;  // processes, at most
    std::atomic<uint32_t> arrivals;  // while any sleep, which is what wakes them
  };
  Header& header() const { return *(Header*)memory_; }
  std::atomic<uint64_t>& arrived(int rank) const { return ((Arrived*)(memory_ + sizeof(Header)))[rank].number; }
  bool has_come(int rank, uint64_t number) const;
  void sleep_until_all_have_come(uint64_t number);
  void wake() const;

  uint8_t* memory_;
  int rank_, count_;
};

class Peers {
 public:
  // Fills places 0 or 1 of all other ranks, so many bytes of each; false where that cannot be, now or ever.
  using Gather = std::function<bool(int places, int64_t bytes)>;

  // `memory` is zeros at first, `size(count, bytes)` of them, aligned to 64, and outlives this. Without `gather` all ranks
  // have it mapped.
  Peers(void* memory, int rank, int count, int64_t bytes, Gather gather = nullptr);
  Peers(const Peers&) = delete;
  static int64_t size(int count, int64_t bytes);
  static int64_t place_at(int count, int64_t bytes, int rank, int places);  // from the beginning of `memory`

  int rank() const { return rank_; }
  int count() const { return count_; }

  // x [count] becomes the sum of what all ranks have there.
  void sum(float* x, int64_t count);

  // out [rows, stride] gets what all ranks have, side by side: x [rows, width] of this one, and `widths` of all. Columns
  // behind them are not written.
  void gather(const float* x, int64_t rows, int64_t x_stride, const int64_t* widths, float* out, int64_t stride);

  // flags [n]: set where any rank's are.
  void any(std::atomic<bool>* flags, int64_t n);

  // As Meeting has them.
  void leave() { meeting_.leave(); }
  bool has_left() const { return meeting_.has_left(); }

 private:
  float* place(int rank, uint64_t meeting) const;
  float* own() const { return place(rank_, meetings_ + 1); }      // for the next meeting
  float* of(int rank) const { return place(rank, meetings_); }  // of the last one
  void meet(int64_t bytes);  // that are in all places
  void gather_piece(const float* x, int64_t rows, int64_t x_stride, int64_t left, int64_t columns, const int64_t* widths,
                    float* out, int64_t stride);

  uint8_t* memory_;
  Meeting meeting_;
  int rank_, count_;
  int64_t bytes_;  // of a place, at least 64
  Gather gather_;
  uint64_t meetings_ = 0;
};

}  // namespace specserve
