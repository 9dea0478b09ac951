// A recorded step: ops in order, run by a thread pool without any Python in between.
//
// To add an op: what it is told, a struct in args.h; its kernel, a function of a header that kernels.cpp includes and lists
// in Kernels; a method of Program, which says how many work items the op has and how to compute some of them; a line in
// module.cpp for Python. An op is asked for its number of items when those before it are complete, so that it may depend
// on what they computed (`rows_from`). kernels.cpp says how to add an instruction set.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "args.h"
#include "expert_peers.h"
#include "peers.h"
#include "prefetch.h"
#include "thread_pool.h"

namespace specserve {

// The rows of one step as AttentionRows of Python has them.
struct StepRows {
  int num_seqs, table_width;
  const int32_t *starts, *cached, *tables, *parents;
};

// What attention needs to know of one step: who owns which rows, and where they lie in the cache.
class Plan {
 public:
  // Keeps nothing of what `rows` points to. Rows that one call of attention computes share what it reads; fewer of them are
  // more pieces for the threads. Of a long context each segment is a piece, if there are few rows in the step.
  Plan(const StepRows& rows, int block_size, int max_rows_per_block);
  Plan(const Plan&) = delete;  // spans point into it
  Plan& operator=(const Plan&) = delete;

  struct Block {
    int span, begin, end;
    int segments;         // pieces that it is computed in; 0: in one
    int64_t parts_before;  // rows times segments of the blocks before it
  };
  struct Piece {
    int block, segment;
  };
  int rows() const { return int(slots_.size()); }
  const Span& span(int i) const { return spans_[i]; }
  const std::vector<Block>& blocks() const { return row_blocks_; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  int64_t num_parts() const { return num_parts_; }  // rows times segments of all blocks
  const int64_t* slots() const { return slots_.data(); }
  // Set by the step that runs: whether keys or values of a row were not finite.
  std::atomic<bool>* broken() const { return broken_.get(); }

 private:
  void add_paths(int s, const int32_t* parents, int count);

  std::vector<int32_t> tables_;
  std::vector<std::vector<int32_t>> paths_, path_starts_;
  std::vector<Span> spans_;
  std::vector<Block> row_blocks_;
  std::vector<Piece> pieces_;
  int64_t num_parts_ = 0;
  std::vector<int64_t> slots_;
  std::unique_ptr<std::atomic<bool>[]> broken_;
};

// How many rows the ops of a program have: those of the step, and those gathered from it.
struct Rows {
  int step = 0, gathered = 0;
  std::shared_ptr<const Plan> plan;
};

// The weights of experts that some rows go to, which is known when `find_stretches` is called. An item is some tiles of one
// of them: all of the first one's, then the second's.
class Routed {
 public:
  Routed(const Pairs& pairs, const Weight& weight, int tiles_per_item);
  void find_stretches();
  const Pairs& pairs() const { return pairs_; }
  int num_items() const { return weight_.outputs / kTile / tiles_; }  // of each expert
  Weight weight(int i) const;                                         // of the i-th that rows go to
  // The place `lead` bytes after item `begin`, for whoever reads up to `end`.
  Ahead reading(int begin, int end, int lead) const;

 private:
  Pairs pairs_;
  Weight weight_;
  int tiles_;
  std::vector<Stretch> stretches_;
};

class Program {
 public:
  Program(std::shared_ptr<ThreadPool> pool, const Kernels& kernels);
  ~Program() { close(); }
  Program(const Program&) = delete;  // ops point to it
  Program& operator=(const Program&) = delete;

  // Ops run in the order of these calls. Pointers stay the caller's and outlive the program.
  void embed(const EmbedArgs& args);
  void fused_add_norm(const FusedAddNormArgs& args);
  void joined_norms(const JoinedNormsArgs& args);
  void norm_projections(const NormProjectionsArgs& args);
  void linear(const LinearArgs& args);
  void gated(const GatedArgs& args);
  void find_adapters(const int64_t* slots, int64_t* any);  // whether any row has a slot
  void shrink(const ShrinkArgs& args, const int64_t* any);  // these two do nothing where none has
  void embed_adapters(const EmbedAdaptersArgs& args, const int64_t* any);
  void rope_and_cache(const RopeAndCacheArgs& args);
  void attention(const AttentionArgs& args);
  void quantize_activation(const QuantizeActivationArgs& args);
  void softcap(float* x, int width, float cap);
  void route(const RouteArgs& args);
  void experts(const ExpertsArgs& args);  // several ops
  // The same for the rows of all replicas, of those experts that this one has. All of them run it, with any rows or none.
  void peer_experts(const PeerExpertsArgs& args, std::shared_ptr<ExpertPeers> peers);
  void argmax(const float* x, int n, int64_t* best);  // x [rows, n padded]
  void top_k(const TopKArgs& args);
  void draw(const DrawArgs& args);
  void gather_rows(const GatherRowsArgs& args);  // ops after it work on the gathered rows
  void tap(const GatherRowsArgs& args);          // the same of all rows, and ops after it work on all rows

  // Rows whose keys or values are broken in any rank are so in all.
  void share_broken(std::shared_ptr<Peers> peers);
  // Sums and parts of all ranks; `widths` are theirs. x, [rows, width] both, and `out` as Peers has them.
  void sum_peers(std::shared_ptr<Peers> peers, float* x, int width);
  void gather_peers(std::shared_ptr<Peers> peers, const float* x, int stride, std::vector<int64_t> widths, float* out, int out_stride);

  // Ops after it work on as many rows as `count` holds when they run, an op before them having written it: no more than
  // their buffers hold. Null: on those of the step again.
  void rows_from(const int64_t* count);

  void run(const Rows& rows);

  // As run, in two: `start` lets the pool's other threads begin, `finish` does what they have left. Between them its caller
  // does something else, and leaves alone what the ops read and write.
  void start(const Rows& rows);
  void finish();

  // Returns when no thread is in here any more; nothing runs after it.
  void close();

  // As run, and the seconds that each op took, in order.
  std::vector<double> profile(const Rows& rows);
  const std::vector<const char*>& names() const { return names_; }

 private:
  // How many rows an op works on. Plain numbers: between two uses everything was pushed out of the caches.
  struct RowCount {
    enum class Of { kStep, kGathered, kAttentionPieces, kPointer } of = Of::kStep;
    const int64_t* pointer = nullptr;
    const int64_t* unless_zero = nullptr;  // else on none
    int in(const Rows& rows) const;
  };
  struct Op {
    RowCount rows;
    std::function<void(const Rows&, int begin, int end, void* scratch, Ahead& ahead)> run;
    int num_items = 1;  // pieces of work that threads share: of each row, or of all of them together where there are weights
    const uint8_t* weights = nullptr;  // what the items read, one after the other
    int64_t item_bytes = 0;
    std::shared_ptr<const Routed> routed = nullptr;  // or of experts, which ops before it choose: num_items for each
    bool is_joint = false;                           // items are of all rows together without weights, too
    int items(const Rows& pass) const {
      const int n = std::max(0, rows.in(pass));
      if (routed) return n ? int(*routed->pairs().num_active) * num_items : 0;
      return weights || is_joint ? (n ? num_items : 0) : n * num_items;
    }
  };
  // One run. Threads that come to it late keep it alive.
  struct Pass {
    uint32_t number;
    Rows rows;
    int lead;  // bytes from the weights that are read to those that are prefetched; 0: none are
  };
  // A number of items in the newest pass that has changed it: nothing has to be reset, and whoever is late notices.
  class Count {
   public:
    // Adds at most `most` while it is below `limit`; how many were there, or -1: nothing is left.
    int take(uint32_t pass, int most, int limit);
    // Returns how many there are then.
    int add(uint32_t pass, int items);
    void set(uint32_t pass, int items);
    // What was set in this pass; 0 where a newer one has begun, -1 where nothing was set yet.
    int get(uint32_t pass) const;

   private:
    std::atomic<uint64_t> value_{0};  // pass << 32 | items
  };
  // One thread's part in all ops.
  struct Part {
    std::vector<Stretch> weights;        // its shares of them, in the order of the ops
    std::vector<int> num_read;           // of each op, how many of these it and those before it read
    std::vector<Count> taken;            // of each op, items of its share, by anybody
    std::vector<uint8_t> scratch;
  };
  void add(const char* name, Op op, int64_t scratch_bytes = 0);
  // Tiles [begin, end) of one expert, the i-th that rows go to, for `rows` pairs from `first` on.
  using RunExpert = std::function<void(int i, int rows, int first, int begin, int end, Ahead& ahead)>;
  void add_gated_mlps(const ExpertsArgs& args, std::shared_ptr<const Routed> gate_up, std::shared_ptr<const Routed> down);
  void add_combine(const CombineArgs& args);
  void add_routed(const char* name, std::shared_ptr<const Routed> routed, RunExpert run);
  void attend(const AttentionArgs& args, const Plan& plan, const Plan::Piece& piece, int kv_head, void* scratch, Ahead& ahead);
  std::shared_ptr<const Pass> begin(const Rows& rows);
  void count_items(int index, const Pass& pass);
  Job job(const Rows& rows);
  void ended();
  void work(int index, const Pass& pass, int thread);
  Ahead reading(int index, int thread, int begin, int end, int lead) const;
  Ahead idle(int index, int thread, int lead) const;
  void fetch_first(int thread) const;
  bool fetch_next(int thread, int turn) const;
  int share(int items, int thread) const { return int(int64_t(items) * thread / pool_->threads()); }

  std::shared_ptr<ThreadPool> pool_;
  const Kernels& kernels_;
  RowCount rows_;  // of an op that is added now
  std::vector<Op> ops_;
  std::vector<const char*> names_;
  std::vector<Part> parts_;  // of each thread
  std::vector<Count> items_ = std::vector<Count>(1);  // of each op, set when those before it are complete; at the end one more
  std::vector<Count> done_;   // of each op, items that are computed
  std::vector<float> segments_;  // what attention's segments come to, of all pieces of one op
  std::unique_ptr<std::atomic<int>[]> segments_done_;  // of each block and kv head; 0 between ops
  int num_segments_done_ = 0, most_kv_heads_ = 0;
  int64_t most_part_floats_ = 0;  // of a row
  uint32_t number_ = 0;       // of the newest pass
  std::shared_ptr<const Job> started_;
  bool is_closed_ = false;
  PrefetchChoice prefetch_;
  std::chrono::steady_clock::time_point begun_;  // of the newest pass
};

}  // namespace specserve
