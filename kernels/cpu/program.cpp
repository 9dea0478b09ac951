// Records ops and shares each of them out among the threads of a pool.
#include "program.h"

#include <utility>

namespace specserve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPiecesPerThread = 8;  // so many that a thread that is held up leaves its share to the others
constexpr int kMaxLead = 8192;
constexpr int kEnoughSegments = 4;   // pieces of a context that keep the threads busy whatever the rows
constexpr int64_t kFetchedAtOnce = 4096;       // bytes, between two looks for the next step
constexpr int64_t kFetchedMeanwhile = 2 << 20;  // bytes, while the host prepares that: as much as any L3 has room for

// Bytes from what is read to what is asked for: they cover memory's latency and leave most of an L1 to other things. With
// few rows the hardware itself asks early enough, and more would only be in its way.
int lead_of(const Rows& rows) { return std::min(kMaxLead, 2048 + 1024 * std::min(rows.step, 8)); }

// Whether each row's parent is the one before it, and that of the first is `first`.
bool is_chain(const int32_t* parents, int count, int first) {
  for (int row = 1; row < count; ++row)
    if (parents[row] != row - 1) return false;
  return !count || parents[0] == first;
}

int path_length(const int32_t* parents, int row) {
  int n = 0;
  for (int node = row; node >= 0; node = parents[node]) ++n;
  return n;
}

}  // namespace

Plan::Plan(const StepRows& rows, int block_size, int max_rows_per_block)
    : tables_(rows.tables, rows.tables + int64_t(rows.num_seqs) * rows.table_width),
      paths_(rows.num_seqs),
      path_starts_(rows.num_seqs) {
  slots_.reserve(rows.starts[rows.num_seqs]);
  const bool is_few = rows.starts[rows.num_seqs] <= kRowBlock;
  for (int s = 0; s < rows.num_seqs; ++s) {
    const int first = rows.starts[s], last = rows.starts[s + 1], count = last - first, cached = rows.cached[s];
    const int32_t* table = tables_.data() + int64_t(s) * rows.table_width;
    const bool is_block = count > 1 && is_chain(rows.parents + first, count, count - 1);
    const bool is_tree = !is_block && !is_chain(rows.parents + first, count, -1);
    if (is_tree) add_paths(s, rows.parents + first, count);
    spans_.push_back({first, last, cached, block_size, table, is_tree ? paths_[s].data() : nullptr,
                      is_tree ? path_starts_[s].data() : nullptr, is_block});
    const int all = (cached + count + kSegment - 1) / kSegment, segments = is_few && all > 1 ? all : 0;
    const int most = segments >= kEnoughSegments ? kRowBlock : std::min(max_rows_per_block, kRowBlock);
    const int blocks = (count + most - 1) / most;
    for (int b = 0; b < blocks; ++b) {
      const int begin = count * b / blocks, end = count * (b + 1) / blocks;
      for (int i = 0; i < std::max(segments, 1); ++i) pieces_.push_back({int(row_blocks_.size()), i});
      row_blocks_.push_back({s, begin, end, segments, num_parts_});
      num_parts_ += int64_t(end - begin) * segments;
    }
    for (int i = cached; i < cached + count; ++i)
      slots_.push_back(int64_t(table[i / block_size]) * block_size + i % block_size);
  }
  broken_.reset(new std::atomic<bool>[slots_.size()]());
}

void Plan::add_paths(int s, const int32_t* parents, int count) {
  path_starts_[s].push_back(0);
  for (int r = 0; r < count; ++r) {
    const int start = path_starts_[s].back(), n = path_length(parents, r);
    paths_[s].resize(start + n);
    int at = start + n;
    for (int node = r; node >= 0; node = parents[node]) paths_[s][--at] = node;
    path_starts_[s].push_back(start + n);
  }
}

Program::Program(std::shared_ptr<ThreadPool> pool, const Kernels& kernels)
    : pool_(std::move(pool)), kernels_(kernels), parts_(pool_->threads()) {}

void Program::close() {
  if (std::exchange(is_closed_, true) || pool_->is_orphaned()) return;
  finish();
  pool_->run({[](int) {}});  // nobody is in here after it
}

void Program::add(const char* name, Op op, int64_t scratch_bytes) {
  const int with_weights = op.weights ? op.num_items : 0;
  for (int thread = 0; thread < pool_->threads(); ++thread) {
    Part& part = parts_[thread];
    const int begin = share(with_weights, thread), end = share(with_weights, thread + 1);
    if (begin < end) part.weights.push_back({op.weights + begin * op.item_bytes, op.weights + end * op.item_bytes});
    part.num_read.push_back(int(part.weights.size()));
    part.taken = std::vector<Count>(ops_.size() + 1);
    if (scratch_bytes > int64_t(part.scratch.size())) part.scratch.resize(scratch_bytes);
  }
  ops_.push_back(std::move(op));
  names_.push_back(name);
  items_ = std::vector<Count>(ops_.size() + 1);
  done_ = std::vector<Count>(ops_.size());
}

void Program::embed(const EmbedArgs& args) {
  add("embed", {rows_, [this, args](const Rows&, int begin, int end, void*, Ahead&) { kernels_.embed(args, begin, end); }});
}

void Program::fused_add_norm(const FusedAddNormArgs& args) {
  const auto run = [this, args](const Rows&, int begin, int end, void* scratch, Ahead&) { kernels_.fused_add_norm(args, begin, end, (float*)scratch); };
  add("fused_add_norm", {rows_, run}, args.width * sizeof(float));
}

void Program::joined_norms(const JoinedNormsArgs& args) {
  const auto run = [this, args](const Rows&, int begin, int end, void* scratch, Ahead&) { kernels_.joined_norms(args, begin, end, (float*)scratch); };
  add("joined_norms", {rows_, run}, (args.out.width + kTile) * sizeof(float));
}

void Program::norm_projections(const NormProjectionsArgs& args) {
  const auto run = [this, args](const Rows&, int begin, int end, void* scratch, Ahead&) { kernels_.norm_projections(args, begin, end, (float*)scratch); };
  add("norm_projections", {rows_, run}, padded(args.q) * sizeof(float));
}

void Program::linear(const LinearArgs& args) {
  const auto run = [this, args, count = rows_](const Rows& rows, int begin, int end, void*, Ahead& ahead) {
    kernels_.linear(args, count.in(rows), begin, end, ahead);
  };
  add("linear", {rows_, run, args.weight.outputs / kTile, args.weight.data, args.weight.tile_bytes});
}

void Program::gated(const GatedArgs& args) {
  const auto run = [this, args, count = rows_](const Rows& rows, int begin, int end, void*, Ahead& ahead) {
    kernels_.gated(args, count.in(rows), begin, end, ahead);
  };
  const int tiles = args.is_gated ? 2 : 1;  // of an item
  add(args.is_gated ? "gated" : "activated",
      {rows_, run, args.weight.outputs / kTile / tiles, args.weight.data, tiles * args.weight.tile_bytes});
}

void Program::find_adapters(const int64_t* slots, int64_t* any) {
  const auto run = [slots, any, count = rows_](const Rows& rows, int, int, void*, Ahead&) {
    *any = std::any_of(slots, slots + count.in(rows), [](int64_t slot) { return slot >= 0; });
  };
  Op op{rows_, run};
  op.is_joint = true;
  add("find_adapters", std::move(op));
}

void Program::shrink(const ShrinkArgs& args, const int64_t* any) {
  RowCount count = rows_;
  count.unless_zero = any;
  const auto run = [this, args, count](const Rows& rows, int begin, int end, void*, Ahead&) {
    kernels_.shrink(args, count.in(rows), begin, end);
  };
  add("shrink", {count, run, args.adapters.stride / kTile});
}

void Program::embed_adapters(const EmbedAdaptersArgs& args, const int64_t* any) {
  RowCount count = rows_;
  count.unless_zero = any;
  const auto run = [this, args](const Rows&, int begin, int end, void*, Ahead&) { kernels_.embed_adapters(args, begin, end); };
  add("embed_adapters", {count, run});
}

void Program::rope_and_cache(const RopeAndCacheArgs& args) {
  const int heads = args.heads + 2 * args.kv_heads;
  const auto run = [this, args](const Rows& rows, int begin, int end, void* scratch, Ahead&) {
    kernels_.rope_and_cache(args, rows.plan->slots(), rows.plan->broken(), begin, end, (float*)scratch);
  };
  add("rope_and_cache", {rows_, run, heads}, 2 * args.head_dim * sizeof(float));
}

void Program::attention(const AttentionArgs& args) {
  const auto run = [this, args](const Rows& rows, int begin, int end, void* scratch, Ahead& ahead) {
    for (int i = begin; i < end; ++i)
      attend(args, *rows.plan, rows.plan->pieces()[i / args.kv_heads], i % args.kv_heads, scratch, ahead);
  };
  most_kv_heads_ = std::max(most_kv_heads_, args.kv_heads);
  most_part_floats_ = std::max(most_part_floats_, part_floats(args.heads, args.head_dim));
  add("attention", {{RowCount::Of::kAttentionPieces}, run, args.kv_heads}, attention_scratch_bytes(args.heads / args.kv_heads, args.head_dim));
}

// Whoever completes the last segment of a block adds them all up.
void Program::attend(const AttentionArgs& args, const Plan& plan, const Plan::Piece& piece, int kv_head, void* scratch, Ahead& ahead) {
  const Plan::Block& block = plan.blocks()[piece.block];
  const Span& span = plan.span(block.span);
  if (!block.segments) return kernels_.attention(args, span, block.begin, block.end, kv_head, scratch, ahead);
  const int64_t size = part_floats(int64_t(block.end - block.begin) * (args.heads / args.kv_heads), args.head_dim);
  float* parts = segments_.data() + block.parts_before * part_floats(args.heads, args.head_dim) + kv_head * block.segments * size;
  kernels_.attention_segment(args, span, block.begin, block.end, kv_head, piece.segment, parts + piece.segment * size, scratch, ahead);
  std::atomic<int>& done = segments_done_[piece.block * args.kv_heads + kv_head];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < block.segments) return;
  done.store(0, std::memory_order_relaxed);
  kernels_.merge_segments(args, span, block.begin, block.end, kv_head, block.segments, parts, scratch);
}

void Program::quantize_activation(const QuantizeActivationArgs& args) {
  const auto run = [this, args](const Rows&, int begin, int end, void*, Ahead&) {
    kernels_.quantize_activation(args, begin, end);
  };
  add("quantize_activation", {rows_, run});
}

void Program::softcap(float* x, int width, float cap) {
  const auto run = [this, x, width, cap](const Rows&, int begin, int end, void*, Ahead&) {
    kernels_.softcap(x, width, cap, begin, end);
  };
  add("softcap", {rows_, run});
}

void Program::argmax(const float* x, int n, int64_t* best) {
  const auto run = [this, x, n, best](const Rows&, int begin, int end, void*, Ahead&) {
    kernels_.argmax(x, int(padded(n)), n, best, begin, end);
  };
  add("argmax", {rows_, run});
}

void Program::top_k(const TopKArgs& args) {
  add("top_k", {rows_, [this, args](const Rows&, int begin, int end, void*, Ahead&) { kernels_.top_k(args, begin, end); }});
}

void Program::draw(const DrawArgs& args) {
  const auto run = [this, args](const Rows&, int begin, int end, void* scratch, Ahead&) {
    kernels_.draw(args, begin, end, (float*)scratch);
  };
  add("draw", {rows_, run}, 2 * padded(args.n) * sizeof(float));
}

void Program::gather_rows(const GatherRowsArgs& args) {
  rows_ = {RowCount::Of::kGathered};
  add("gather_rows",
      {rows_, [this, args](const Rows&, int begin, int end, void*, Ahead&) { kernels_.gather_rows(args, begin, end); }});
}

void Program::tap(const GatherRowsArgs& args) {
  add("tap", {rows_, [this, args](const Rows&, int begin, int end, void*, Ahead&) { kernels_.gather_rows(args, begin, end); }});
}

void Program::share_broken(std::shared_ptr<Peers> peers) {
  Op op{rows_, [peers](const Rows& rows, int, int, void*, Ahead&) { peers->any(rows.plan->broken(), rows.plan->rows()); }};
  op.is_joint = true;
  add("share_broken", std::move(op));
}

void Program::sum_peers(std::shared_ptr<Peers> peers, float* x, int width) {
  const auto run = [peers, x, width, count = rows_](const Rows& rows, int, int, void*, Ahead&) {
    peers->sum(x, int64_t(count.in(rows)) * width);
  };
  Op op{rows_, run};
  op.is_joint = true;
  add("sum_peers", std::move(op));
}

void Program::gather_peers(std::shared_ptr<Peers> peers, const float* x, int stride, std::vector<int64_t> widths, float* out,
                           int out_stride) {
  const auto run = [=, count = rows_](const Rows& rows, int, int, void*, Ahead&) {
    peers->gather(x, count.in(rows), stride, widths.data(), out, out_stride);
  };
  Op op{rows_, run};
  op.is_joint = true;
  add("gather_peers", std::move(op));
}

void Program::rows_from(const int64_t* count) {
  rows_ = count ? RowCount{RowCount::Of::kPointer, count} : RowCount{};
}

int Program::RowCount::in(const Rows& rows) const {
  if (unless_zero && !*unless_zero) return 0;
  switch (of) {
    case Of::kStep: return rows.step;
    case Of::kGathered: return rows.gathered;
    case Of::kAttentionPieces: return int(rows.plan->pieces().size());
    case Of::kPointer: return int(*pointer);
  }
  return 0;
}

int Program::Count::take(uint32_t pass, int most, int limit) {
  for (uint64_t value = value_.load(std::memory_order_relaxed);;) {
    const int32_t newer = int32_t(uint32_t(value >> 32) - pass);
    const int taken = newer < 0 ? 0 : int(uint32_t(value));
    if (newer > 0 || taken >= limit) return -1;
    const uint64_t wanted = uint64_t(pass) << 32 | uint32_t(taken + most);
    if (value_.compare_exchange_weak(value, wanted, std::memory_order_relaxed)) return taken;
  }
}

int Program::Count::add(uint32_t pass, int items) {
  for (uint64_t value = value_.load(std::memory_order_relaxed);;) {
    const uint32_t before = uint32_t(value >> 32) == pass ? uint32_t(value) : 0;
    const uint64_t wanted = uint64_t(pass) << 32 | (before + items);
    if (value_.compare_exchange_weak(value, wanted, std::memory_order_acq_rel, std::memory_order_relaxed))
      return int(before) + items;
  }
}

void Program::Count::set(uint32_t pass, int items) {
  value_.store(uint64_t(pass) << 32 | uint32_t(items), std::memory_order_release);
}

int Program::Count::get(uint32_t pass) const {
  const uint64_t value = value_.load(std::memory_order_acquire);
  const int32_t newer = int32_t(uint32_t(value >> 32) - pass);
  return newer > 0 ? 0 : newer < 0 ? -1 : int(uint32_t(value));
}

// Says how many items the op has, whose predecessors are complete, and where it has none the next one too. One thread calls
// it: whoever completed the op before. A thread that comes late finds the number as it was then, whatever has become of
// what it was computed from.
void Program::count_items(int index, const Pass& pass) {
  const int end = int(ops_.size());
  for (int items = 0; !items && index <= end; ++index) {
    items = index < end ? ops_[index].items(pass.rows) : 0;
    items_[index].set(pass.number, items);
  }
}

// First the thread's own share, then what the others have left of theirs; then waits until all of the op is computed. Only
// those are waited for who are computing: a thread that lost its core leaves its share to the others.
void Program::work(int index, const Pass& pass, int thread) {
  const Op& op = ops_[index];
  const int items = items_[index].get(pass.number), threads = pool_->threads();
  const int piece = std::max(1, items / (threads * kPiecesPerThread));
  Ahead ahead = idle(index, thread, pass.lead);
  int computed = 0;
  for (int turn = 0; turn < threads; ++turn) {
    const int owner = (thread + turn) % threads, first = share(items, owner), last = share(items, owner + 1);
    Count& taken = parts_[owner].taken[index];
    for (int at; (at = taken.take(pass.number, piece, last - first)) >= 0;) {
      const int begin = first + at, end = std::min(begin + piece, last);
      if (op.weights) ahead = reading(index, thread, begin, turn ? end : last, pass.lead);
      if (op.routed) ahead = op.routed->reading(begin, turn ? end : last, pass.lead);
      op.run(pass.rows, begin, end, parts_[thread].scratch.data(), ahead);
      computed += end - begin;
      pool_->beat(thread);
    }
  }
  if (computed && done_[index].add(pass.number, computed) == items) count_items(index + 1, pass);
  for (Wait wait; items_[index + 1].get(pass.number) < 0;) wait.once();
}

// The place `lead` bytes after item `begin`, for a thread that reads up to item `end` and then its shares of later ops.
Ahead Program::reading(int index, int thread, int begin, int end, int lead) const {
  if (!lead) return {};
  const Op& op = ops_[index];
  const std::vector<Stretch>& weights = parts_[thread].weights;
  Ahead ahead{op.weights + begin * op.item_bytes, op.weights + end * op.item_bytes,
              weights.data() + parts_[thread].num_read[index], weights.data() + weights.size()};
  for (; lead >= ahead.end - ahead.at && ahead.next < ahead.last; ++ahead.next) {
    lead -= int(ahead.end - ahead.at);
    ahead.at = ahead.next->begin;
    ahead.end = ahead.next->end;
  }
  ahead.at += lead;
  return ahead;
}

// What an op that reads no weights may ask for: the thread's share of the next op that does, and no more.
Ahead Program::idle(int index, int thread, int lead) const {
  const Part& part = parts_[thread];
  if (!lead || part.num_read[index] == int(part.weights.size())) return {};
  const Stretch& next = part.weights[part.num_read[index]];
  return {next.begin, next.end, nullptr, nullptr};
}

void Program::fetch_first(int thread) const {
  if (parts_[thread].weights.empty()) return;
  const Stretch& first = parts_[thread].weights[0];
  for (int64_t i = 0; i < std::min<int64_t>(kMaxLead, first.end - first.begin); i += 64) __builtin_prefetch(first.begin + i);
}

// While the host works, the threads that wait for it bring what the next step reads first closer, for themselves and the
// caller's thread. A thread may have to do it for two.
bool Program::fetch_next(int thread, int turn) const {
  const int threads = pool_->threads(), helpers = threads - 1;
  const int64_t offset = turn * kFetchedAtOnce;
  for (int owner = thread - 1; owner < threads; owner += helpers) {
    int64_t before = 0;
    for (const Stretch& stretch : parts_[owner].weights) {
      const int64_t bytes = stretch.end - stretch.begin, first = offset - before;
      for (int64_t i = first; i >= 0 && i < std::min(bytes, first + kFetchedAtOnce); i += 64)
        __builtin_prefetch(stretch.begin + i, 0, 2);
      before += bytes;
      if (before > offset) break;
    }
  }
  return offset + kFetchedAtOnce < kFetchedMeanwhile / threads;
}

std::shared_ptr<const Program::Pass> Program::begin(const Rows& rows) {
  begun_ = Clock::now();
  if (rows.plan && rows.plan->num_parts()) {  // nobody computes anything now
    if (const int64_t floats = rows.plan->num_parts() * most_part_floats_; floats > int64_t(segments_.size())) segments_.resize(floats);
    if (const int counts = int(rows.plan->blocks().size()) * most_kv_heads_; counts > num_segments_done_) {
      segments_done_.reset(new std::atomic<int>[counts]());
      num_segments_done_ = counts;
    }
  }
  auto pass = std::make_shared<const Pass>(Pass{++number_, rows, prefetch_.next(rows.step) ? lead_of(rows) : 0});
  count_items(0, *pass);
  return pass;
}

Job Program::job(const Rows& rows) {
  const auto run = [this, pass = begin(rows)](int thread) {
    if (pass->lead) fetch_first(thread);
    for (int i = 0; i < int(ops_.size()); ++i) work(i, *pass, thread);
  };
  if (ops_.size() == 1) return {run, false};
  return {run, false, [this](int thread, int turn) { return fetch_next(thread, turn); }};
}

void Program::ended() { prefetch_.took(std::chrono::duration<double>(Clock::now() - begun_).count()); }

void Program::run(const Rows& rows) {
  pool_->run(job(rows));
  ended();
}

void Program::start(const Rows& rows) {
  finish();  // what somebody has left
  started_ = pool_->start(job(rows));
}

void Program::finish() {
  if (const auto job = std::exchange(started_, nullptr); job && pool_->finish(job)) ended();
}

std::vector<double> Program::profile(const Rows& rows) {
  std::vector<double> seconds;
  pool_->run({[this, &seconds, pass = begin(rows)](int thread) {
    if (pass->lead) fetch_first(thread);
    Clock::time_point begun = Clock::now();
    for (int i = 0; i < int(ops_.size()); ++i) {
      work(i, *pass, thread);
      if (thread) continue;
      const Clock::time_point now = Clock::now();
      seconds.push_back(std::chrono::duration<double>(now - begun).count());
      begun = now;
    }
  }});
  ended();
  return seconds;
}

int64_t attention_scratch_bytes(int share, int head_dim) {
  const int64_t width = padded(head_dim), queries = int64_t(kRowBlock) * share;
  const int64_t floats = queries * (width + kChunk + 3) + 2 * part_floats(queries, head_dim) + 2 * width * kChunk +
                         int64_t(share) * head_dim + 11 * kTile;
  return floats * int64_t(sizeof(float));
}

}  // namespace specserve
