// Replicas of a model that have some of its experts each, and the memory that all of them have mapped.
//
// In a layer each lays its rows down with the experts that they go to, and meets the others; computes the pairs of all
// replicas' rows and its own experts, and lays what comes of each where the row's replica looks for it; and meets them
// again. What lies there is written to again after the next meeting only, when everybody has read it. So nobody adds up
// what others have added up: a row's sum is made by its replica, of the same numbers and in the same order as if that had
// all experts.
#pragma once

#include <cstdint>

#include "args.h"
#include "peers.h"

namespace specserve {

class ExpertPeers {
 public:
  struct Sizes {
    int max_rows;    // of a replica
    int per_token;   // experts of a row, at most
    Kind kind;       // of what experts read
    int width;       // of that, padded
    int outputs;     // of an expert, padded
  };

  // `memory` is zeros at first, `size(count, sizes)` of them, aligned to 64, that all replicas have mapped, and outlives
  // this.
  ExpertPeers(void* memory, int rank, int count, const Sizes& sizes);
  ExpertPeers(const ExpertPeers&) = delete;
  static int64_t size(int count, const Sizes& sizes);

  int rank() const { return rank_; }
  int count() const { return count_; }
  int most_pairs() const { return sizes_.max_rows * sizes_.per_token; }  // of a replica's rows

  // What a replica lays down: rows, and of each of them the experts.
  Activation rows(int rank) const;                   // [max_rows]
  int32_t* chosen(int rank) const;                   // [max_rows, per_token of the layer]
  std::atomic<int32_t>& num_rows(int rank) const;
  // What its rows' experts return.
  float* found(int rank) const;                      // [max_rows, per_token of the layer, outputs]

  void meet() { meeting_.meet(++meetings_); }
  void leave() { meeting_.leave(); }
  bool has_left() const { return meeting_.has_left(); }

 private:
  struct Place {  // of what a replica lays down, from the beginning of its part of the memory, and how long that is
    int64_t chosen, data, scales, sums, found, size;
  };
  static Place place_of(const Sizes& sizes);
  uint8_t* part(int rank) const;

  uint8_t* memory_;
  Meeting meeting_;
  int rank_, count_;
  Sizes sizes_;
  Place place_;
  uint64_t meetings_ = 0;
};

}  // namespace specserve
