// What each mode of verification does is explained, step by step, in kernels/_torch_verify.py. Here a draft is walked one
// node after the other, and a row that the walk does not come to is never sampled.
#include "verify.h"

#include <algorithm>
#include <climits>

namespace specserve {

namespace {

constexpr int kUnknown = INT_MIN;
constexpr int kMaskWidth = 32;
constexpr int kLawsKept = 16;  // distributions that a thread keeps memory for: trees of a thousand nodes are rare
enum Purpose { kSample, kAccept, kResample, kDraft, kNumPurposes };  // as in specserve/sampling/noise.py

// As in sample.h, whose functions are those of one instruction set.
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

uint64_t row_key(int64_t seed, int64_t position, Purpose purpose) {
  const uint64_t place = uint64_t(position) * kNumPurposes + purpose + 1;
  return mix(mix(uint64_t(seed) ^ 0xD1B54A32D192ED03u) + place * 0x9E3779B97F4A7C15u);
}

double unit(uint64_t key) { return (double(key >> 12) + 0.5) * 0x1p-52; }

}  // namespace

// Through the draft of one sequence.
class Verifier::Walk {
 public:
  Walk(const VerifyArgs& args, const Kernels& kernels, int seq, Memory& memory, int* chosen)
      : args_(args), kernels_(kernels), memory_(memory), chosen_(chosen), seq_(seq), start_(int(args.starts[seq])),
        stop_(int(args.starts[seq + 1])) {
    is_drawn_ = args.temperature[seq] > 0;
    is_tried_ = is_drawn_ && args.verification != kCoupled && stop_ - start_ > 1;
  }

  // Chooses the tokens of rows whose scores nobody has to look at; whether it left any, and would have to look at them in
  // any order.
  bool choose_known() {
    bool is_whole = true;
    for (int row = start_; row < stop_; ++row) {
      chosen_[row] = known(row);
      is_whole = is_whole && chosen_[row] != kUnknown;
    }
    return !is_whole || is_tried_;
  }

  bool is_tried() const { return is_tried_; }

  // The token of a row, or why it has none: a tried draft's best is to see whether any token may come.
  int token(int row) {
    if (chosen_[row] == kUnknown) {
      const double temperature = is_tried_ ? 0.0 : args_.temperature[seq_];
      const int64_t at = row, key = int64_t(row_key(args_.seeds[seq_], args_.positions[row], kSample));
      chosen_[row] = kernels_.sample(sampling(at, temperature, key), 0, scratch());
    }
    return chosen_[row];
  }

  void walk() {
    if (token(start_) < 0) {
      args_.said[start_] = token(start_);
      return;
    }
    const int end = !is_tried_ ? compared() : args_.verification == kBlock ? first_accepted() : descended();
    emit(end, token(end) >= 0 && is_tried_ ? replacement(end) : token(end));
    if (memory_.laws.size() > size_t(kLawsKept) * args_.vocab) std::vector<double>().swap(memory_.laws);
  }

 private:
  int known(int row) const {
    const int best = int(args_.best[row]);
    if (best < 0) return best;
    if ((is_drawn_ && !is_tried_) || args_.is_edited[seq_]) return kUnknown;
    if (!args_.masks) return best;
    const int64_t num_words = (args_.vocab + kMaskWidth - 1) / kMaskWidth;
    return uint32_t(args_.masks[row * num_words + best / kMaskWidth]) >> best % kMaskWidth & 1 ? best : kUnknown;
  }

  SampleArgs sampling(const int64_t& row, const double& temperature, const int64_t& key) const {
    return {args_.scores,          args_.stride,         args_.vocab, &row, &temperature, args_.min_p + seq_,
            args_.top_p + seq_, args_.top_k + seq_, &key,        args_.hashed, args_.masks};
  }

  SampleScratch scratch() const {
    const size_t size = padded(args_.vocab);
    memory_.floats.resize(std::max(memory_.floats.size(), 3 * size));
    memory_.tokens.resize(std::max(memory_.tokens.size(), size));
    float* own = memory_.floats.data();
    return {own, own + size, own + 2 * size, memory_.tokens.data()};
  }

  // Down to the child that is the row's own token, while there is one.
  int compared() {
    int row = start_;
    for (int next = start_ + 1; next < stop_ && token(row) >= 0; ++next)
      if (args_.parents[next] == row && args_.tokens[next] == token(row)) row = next;
    return row;
  }

  // Down to the first child that is accepted, while there is one, each tried with what its elders left.
  int descended() {
    make_keys();
    reserve(1);
    int row = start_;
    compute(row, 0);
    for (int next = start_ + 1; next < stop_ && token(row) >= 0; ++next) {
      if (args_.parents[next] != row) continue;
      if (unit(keys_[next - start_]) <= chance(law(0), 1.0, next)) {
        row = next;
        if (token(row) >= 0) compute(row, 0);
      } else {
        kernels_.reject(law(0), args_.vocab, 1.0, int(args_.tokens[next]), q_, q_total_);
      }
    }
    at_end_ = law(0);
    return row;
  }

  // To the first node that is accepted, each tried after its children, siblings in order. That is the last one in a walk
  // from the root that turns to the youngest child first.
  int first_accepted() {
    make_keys();
    const int rows = stop_ - start_;
    reserve(rows);
    std::vector<double> weights(rows, 1.0);
    std::vector<bool> is_made(rows), exists(rows);
    std::vector<std::vector<int>> below(rows);
    exists[0] = true;
    for (int next = start_ + 1; next < stop_; ++next) {
      const int node = next - start_, parent = int(args_.parents[next]) - start_;
      exists[node] = exists[parent] && token(start_ + parent) >= 0;
      if (!exists[node]) continue;
      below[parent].push_back(node);
      if (!is_made[parent]) compute(start_ + parent, parent);
      is_made[parent] = true;
      const double weight = weights[parent];
      weights[node] = chance(law(parent), weight, next);
      const double total = kernels_.reject(law(parent), args_.vocab, weight, int(args_.tokens[next]), q_, q_total_);
      weights[parent] = weight < 1 ? total / (total + 1 - weight) : 1.0;
    }
    int end = 0;
    std::vector<int> ahead = below[0];
    while (!ahead.empty()) {
      const int node = ahead.back();
      ahead.pop_back();
      if (unit(keys_[node]) <= weights[node]) end = node;
      ahead.insert(ahead.end(), below[node].begin(), below[node].end());
    }
    if (!is_made[end] && token(start_ + end) >= 0) compute(start_ + end, end);
    at_end_ = law(end);
    return start_ + end;
  }

  // Of each node by its whole path, from the step's first position on.
  void make_keys() {
    keys_.resize(stop_ - start_);
    keys_[0] = row_key(args_.seeds[seq_], args_.positions[start_], kAccept);
    for (int row = start_ + 1; row < stop_; ++row)
      keys_[row - start_] = mix(keys_[args_.parents[row] - start_] ^ uint64_t(args_.hashed[args_.tokens[row]]));
  }

  void reserve(int laws) { memory_.laws.resize(std::max(memory_.laws.size(), size_t(laws) * args_.vocab)); }

  double* law(int i) const { return memory_.laws.data() + size_t(i) * args_.vocab; }

  void compute(int row, int i) {
    const int64_t at = row, key = 0;
    kernels_.probabilities(sampling(at, args_.temperature[seq_], key), 0, scratch(), law(i));
  }

  // min(1, w p / q) of a node; 0 where the target cannot emit it, whatever q says. Sets what it was drawn from.
  double chance(const double* p, double weight, int row) {
    const int64_t token = args_.tokens[row];
    q_ = args_.q[seq_] ? args_.q[seq_] + int64_t(row - start_ - 1) * args_.vocab : nullptr;
    q_total_ = q_ ? kernels_.total(q_, args_.vocab) : 1.0;
    const double target = weight * p[token];
    return target > 0 ? std::min(target / (q_ ? q_[token] / q_total_ : 1.0), 1.0) : 0.0;
  }

  // A bonus, or what replaces rejected children, with noise that neither their trial nor their drafter has used.
  int replacement(int end) const {
    const bool has_children = std::find(args_.parents + start_, args_.parents + stop_, end) != args_.parents + stop_;
    const uint64_t key = row_key(args_.seeds[seq_], args_.positions[end], has_children ? kResample : kSample);
    return kernels_.sample_from(at_end_, args_.vocab, key, args_.hashed);
  }

  // The accepted tokens and one more; where there is none, they alone, the last of them unkept.
  void emit(int end, int extra) {
    const int depth = int(args_.positions[end] - args_.positions[start_]);
    args_.counts[seq_] = depth + (extra >= 0);
    if (extra >= 0) args_.said[start_ + depth] = extra;
    for (int row = end, i = depth; i-- > 0; row = int(args_.parents[row])) {
      args_.said[start_ + i] = args_.tokens[row];
      if (i < args_.counts[seq_] - 1) args_.nodes[start_ + i] = row - start_ - 1;
    }
  }

  const VerifyArgs& args_;
  const Kernels& kernels_;
  Memory& memory_;
  int* chosen_;
  const int seq_, start_, stop_;
  bool is_drawn_, is_tried_;
  std::vector<uint64_t> keys_;
  const double* q_ = nullptr;  // of the node that is tried, null: one-hot
  double q_total_ = 1.0;       // sums of float32 miss 1 by 1e-7
  const double* at_end_ = nullptr;
};

template <class Use>
void Verifier::each(int count, Use use) {
  if (count == 1) return use(0, 0);  // waking the others takes as long
  std::atomic<int> next{0};
  pool_->run({[&](int thread) {
    for (int i; (i = next.fetch_add(1)) < count;) use(i, thread);
  }});
}

void Verifier::verify(const VerifyArgs& args) {
  std::lock_guard<std::mutex> only(only_);
  memories_.resize(pool_->threads());
  chosen_.assign(args.starts[args.num_seqs], kUnknown);
  const auto walk = [&](int seq, int thread) { return Walk(args, kernels_, seq, memories_[thread], chosen_.data()); };
  std::vector<int> busy, rows, owners;
  for (int seq = 0; seq < args.num_seqs; ++seq) {
    Walk own = walk(seq, 0);
    if (!own.choose_known()) {
      own.walk();
      continue;
    }
    busy.push_back(seq);
    for (int row = int(args.starts[seq]); row < args.starts[seq + 1]; ++row)
      if (chosen_[row] == kUnknown) rows.push_back(row), owners.push_back(seq);
  }
  if (busy.empty()) return;
  if (int(busy.size()) < pool_->threads() && rows.size() > 1)  // threads to spare for rows that may not be needed
    each(int(rows.size()), [&](int i, int thread) { walk(owners[i], thread).token(rows[i]); });
  each(int(busy.size()), [&](int i, int thread) { walk(busy[i], thread).walk(); });
}

void Verifier::score(const ScoreArgs& args, int count) {
  each(count, [&](int row, int) { kernels_.score(args, row, row + 1); });
}

}  // namespace specserve
