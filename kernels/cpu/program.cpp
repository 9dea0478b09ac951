// Records ops and shares each of them out among the threads of a team.
#include "program.h"

#include <algorithm>
#include <chrono>

namespace specserve {
namespace {

constexpr int kPiecesPerThread = 8;  // so many that a thread that is held up leaves its share to the others

int path_length(const std::vector<int32_t>& parents, int row) {
  int n = 0;
  for (int node = row; node >= 0; node = parents[node]) ++n;
  return n;
}

}  // namespace

Plan::Plan(std::vector<int> starts, std::vector<int> cached, std::vector<std::vector<int32_t>> blocks,
           std::vector<std::vector<int32_t>> parents, int block_size, int max_rows_per_block)
    : starts_(std::move(starts)), tables_(std::move(blocks)), paths_(cached.size()), path_starts_(cached.size()) {
  slots_.reserve(rows());
  for (int s = 0; s < int(cached.size()); ++s) {
    const int count = starts_[s + 1] - starts_[s];
    if (!parents[s].empty()) add_paths(s, parents[s]);
    const bool is_tree = !parents[s].empty();
    spans_.push_back({starts_[s], starts_[s + 1], cached[s], block_size, tables_[s].data(),
                      is_tree ? paths_[s].data() : nullptr, is_tree ? path_starts_[s].data() : nullptr});
    const int most = std::min(max_rows_per_block, kRowBlock), blocks = (count + most - 1) / most;
    for (int b = 0; b < blocks; ++b) row_blocks_.push_back({s, count * b / blocks, count * (b + 1) / blocks});
    for (int i = cached[s]; i < cached[s] + count; ++i)
      slots_.push_back(int64_t(tables_[s][i / block_size]) * block_size + i % block_size);
  }
}

void Plan::add_paths(int s, const std::vector<int32_t>& parents) {
  path_starts_[s].push_back(0);
  for (int r = 0; r < int(parents.size()); ++r) {
    const int start = path_starts_[s].back(), n = path_length(parents, r);
    paths_[s].resize(start + n);
    int at = start + n;
    for (int node = r; node >= 0; node = parents[node]) paths_[s][--at] = node;
    path_starts_[s].push_back(start + n);
  }
}

Program::Program(std::shared_ptr<Team> team, const Kernels& kernels) : team_(std::move(team)), kernels_(kernels) {}

void Program::add(const char* name, Op op, int64_t scratch_bytes) {
  ops_.push_back(std::move(op));
  names_.push_back(name);
  next_ = std::vector<std::atomic<int>>(ops_.size());
  if (scratch_bytes > scratch_stride_) {
    scratch_stride_ = (scratch_bytes + 127) / 64 * 64;  // and a line between neighbours
    scratch_.resize(scratch_stride_ * team_->threads());
  }
}

std::function<int(const Rows&)> Program::rows_here() const {
  if (collected_) return [](const Rows& rows) { return rows.collected; };
  return [](const Rows& rows) { return rows.step; };
}

void Program::embed(const EmbedArgs& args) {
  add("embed", {rows_here(), [this, args](const Rows&, int begin, int end, void*) { kernels_.embed(args, begin, end); }});
}

void Program::norm(const NormArgs& args) {
  const auto run = [this, args](const Rows&, int begin, int end, void* scratch) {
    kernels_.norm(args, begin, end, (float*)scratch);
  };
  add("norm", {rows_here(), run}, args.width * sizeof(float));
}

void Program::linear(const LinearArgs& args) {
  const auto count = rows_here();
  const auto items = [args, count](const Rows& rows) { return count(rows) ? args.weight.outputs / kTile : 0; };
  const auto run = [this, args, count](const Rows& rows, int begin, int end, void*) {
    kernels_.linear(args, count(rows), begin, end);
  };
  add("linear", {items, run});
}

void Program::gated(const GatedArgs& args) {
  const auto count = rows_here();
  const auto items = [args, count](const Rows& rows) { return count(rows) ? args.weight.outputs / kTile / 2 : 0; };
  const auto run = [this, args, count](const Rows& rows, int begin, int end, void*) {
    kernels_.gated(args, count(rows), begin, end);
  };
  add("gated", {items, run});
}

void Program::rotate(const RotateArgs& args) {
  const int heads = args.heads + 2 * args.kv_heads;
  const auto items = [heads](const Rows& rows) { return rows.plan->rows() * heads; };
  const auto run = [this, args](const Rows& rows, int begin, int end, void* scratch) {
    kernels_.rotate(args, rows.plan->slots(), begin, end, (float*)scratch);
  };
  add("rotate", {items, run}, 2 * args.head_dim * sizeof(float));
}

void Program::attention(const AttentionArgs& args) {
  const auto items = [args](const Rows& rows) { return int(rows.plan->blocks().size()) * args.kv_heads; };
  const auto run = [this, args](const Rows& rows, int begin, int end, void* scratch) {
    for (int i = begin; i < end; ++i) {
      const Plan::Block& block = rows.plan->blocks()[i / args.kv_heads];
      kernels_.attention(args, rows.plan->span(block.span), block.begin, block.end, i % args.kv_heads, scratch);
    }
  };
  add("attention", {items, run}, attention_scratch_bytes(args.heads / args.kv_heads, args.head_dim));
}

void Program::activate(const ActivateArgs& args) {
  add("activate",
      {rows_here(), [this, args](const Rows&, int begin, int end, void*) { kernels_.activate(args, begin, end); }});
}

void Program::softcap(float* x, int width, float cap) {
  const auto run = [this, x, width, cap](const Rows&, int begin, int end, void*) {
    kernels_.softcap(x, width, cap, begin, end);
  };
  add("softcap", {rows_here(), run});
}

void Program::argmax(const float* x, int n, int64_t* best) {
  const auto run = [this, x, n, best](const Rows&, int begin, int end, void*) {
    kernels_.argmax(x, int(padded(n)), n, best, begin, end);
  };
  add("argmax", {rows_here(), run});
}

void Program::collect(const CollectArgs& args) {
  collected_ = true;
  add("collect",
      {rows_here(), [this, args](const Rows&, int begin, int end, void*) { kernels_.collect(args, begin, end); }});
}

void Program::work(const Op& op, const Rows& rows, std::atomic<int>& next, void* scratch) const {
  const int items = op.items(rows);
  const int piece = std::max(1, items / (team_->threads() * kPiecesPerThread));
  for (int begin; (begin = next.fetch_add(piece, std::memory_order_relaxed)) < items;)
    op.run(rows, begin, std::min(begin + piece, items), scratch);
}

void Program::reset() {
  for (std::atomic<int>& next : next_) next.store(0, std::memory_order_relaxed);
}

void Program::run(const Rows& rows) {
  reset();
  team_->run([&](int thread) {
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (i) team_->barrier();
      work(ops_[i], rows, next_[i], scratch(thread));
    }
  });
}

std::vector<double> Program::profile(const Rows& rows) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  reset();
  team_->run([&](int thread) {
    Clock::time_point begun = Clock::now();
    for (size_t i = 0; i < ops_.size(); ++i) {
      work(ops_[i], rows, next_[i], scratch(thread));
      team_->barrier();
      if (thread) continue;
      const Clock::time_point now = Clock::now();
      seconds.push_back(std::chrono::duration<double>(now - begun).count());
      begun = now;
    }
  });
  return seconds;
}

int64_t attention_scratch_bytes(int share, int head_dim) {
  const int64_t width = padded(head_dim), queries = int64_t(kRowBlock) * share;
  const int64_t floats = queries * (2 * width + kChunk + 3) + 2 * width * kChunk + int64_t(share) * head_dim + 16 * kLanes;
  return floats * int64_t(sizeof(float));
}

}  // namespace specserve
