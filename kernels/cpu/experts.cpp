// Mixtures of experts: pairs of a row and an expert, by expert, so that an expert's weights are read once for all its rows
// and those of the others not at all.
#include <algorithm>
#include <cstring>
#include <utility>

#include "program.h"

namespace specserve {
namespace {

// From row `first` on.
Activation from_row(Activation x, int64_t first) {
  const int64_t bytes = x.kind == Kind::kFloat32 ? 4 : x.kind == Kind::kBfloat16 ? 2 : 1;
  x.data = (uint8_t*)x.data + first * x.width * bytes;
  if (x.kind != Kind::kInt8) return x;
  x.scales += first * (x.width / kGroup);
  x.sums += first * (x.width / kGroup);
  return x;
}

void copy_row(const Activation& x, int64_t from, const Activation& out, int64_t to) {
  const Activation source = from_row(x, from), target = from_row(out, to), next = from_row(target, 1);
  std::memcpy(target.data, source.data, (uint8_t*)next.data - (uint8_t*)target.data);
  if (x.kind != Kind::kInt8) return;
  std::copy(source.scales, source.scales + x.width / kGroup, target.scales);
  std::copy(source.sums, source.sums + x.width / kGroup, target.sums);
}

// By counting: an expert's pairs are in the order that `each` calls with them, with an expert and whatever tells the pair,
// twice alike. `place` is told where each pair goes. Returns how many there are.
template <class Each, class Place>
int sort_pairs(const Pairs& pairs, const Each& each, const Place& place) {
  int32_t* next = pairs.starts;  // of each expert: first how many there are, then where its next one goes
  std::fill(next, next + pairs.experts, 0);
  each([&](int expert, int) { ++next[expert]; });
  int start = 0, active = 0;
  for (int expert = 0; expert < pairs.experts; ++expert) {
    const int own = std::exchange(next[expert], start);
    if (own) pairs.active[active++] = expert;
    start += own;
  }
  each([&](int expert, int pair) { place(next[expert]++, pair); });
  // Now each `next` is where the following expert's begin; those without pairs are left out.
  for (int i = 0; i < active; ++i) pairs.starts[i] = next[pairs.active[i]];
  for (int i = active; i > 0; --i) pairs.starts[i] = pairs.starts[i - 1];
  pairs.starts[0] = 0;
  *pairs.num_active = active;
  return start;
}

// Of all of a step's rows.
void sort_own_pairs(const Pairs& pairs, int rows) {
  const auto each = [&](const auto& use) {
    for (int i = 0; i < rows * pairs.top_k; ++i) use(pairs.chosen[i], i);
  };
  sort_pairs(pairs, each, [&](int at, int pair) {
    pairs.rows[at] = pair / pairs.top_k;
    pairs.of_row[pair] = at;
  });
}

struct OwnPair {
  int32_t expert, pair;  // counted from this replica's first; rank * most_pairs + row * top_k + place
};

// Of all replicas' rows those that go to this one's experts, `first` and so on. What the others have laid down is read
// once: where one has left it may change.
int sort_pairs_of_all(const Pairs& pairs, const ExpertPeers& peers, int first, std::vector<OwnPair>& found) {
  found.clear();
  for (int rank = 0; rank < peers.count(); ++rank) {
    const int count = std::min(peers.num_rows(rank).load(std::memory_order_relaxed) * pairs.top_k, peers.most_pairs());
    const int32_t* chosen = peers.chosen(rank);
    for (int i = 0; i < count; ++i)
      if (const int own = chosen[i] - first; own >= 0 && own < pairs.experts) found.push_back({own, rank * peers.most_pairs() + i});
  }
  const auto each = [&](const auto& use) {
    for (const OwnPair& own : found) use(own.expert, own.pair);
  };
  return sort_pairs(pairs, each, [&](int at, int pair) { pairs.rows[at] = pair; });
}

constexpr int64_t kOne = 1;  // item of an op that is no row's

}  // namespace

Routed::Routed(const Pairs& pairs, const Weight& weight, int tiles_per_item)
    : pairs_(pairs), weight_(weight), tiles_(tiles_per_item), stretches_(pairs.experts) {}

void Routed::find_stretches() {
  const int64_t bytes = weight_.outputs / kTile * weight_.tile_bytes;
  for (int64_t i = 0; i < *pairs_.num_active; ++i) {
    const uint8_t* begin = weight_.data + pairs_.active[i] * bytes;
    stretches_[i] = {begin, begin + bytes};
  }
}

Weight Routed::weight(int i) const {
  Weight own = weight_;
  own.data = stretches_[i].begin;
  return own;
}

Ahead Routed::reading(int begin, int end, int lead) const {
  if (!lead) return {};
  const int items = num_items(), last = (end - 1) / items;
  const Stretch* next = stretches_.data() + begin / items;
  Ahead ahead{next->begin + begin % items * tiles_ * weight_.tile_bytes, next->end, next + 1, stretches_.data() + last + 1};
  for (; lead >= ahead.end - ahead.at && ahead.next < ahead.last; ++ahead.next) {
    lead -= int(ahead.end - ahead.at);
    ahead.at = ahead.next->begin;
    ahead.end = ahead.next->end;
  }
  ahead.at += lead;
  return ahead;
}

void Program::route(const RouteArgs& args) {
  const auto run = [this, args](const Rows&, int begin, int end, void* scratch, Ahead&) {
    kernels_.route(args, begin, end, (float*)scratch);
  };
  add("route", {rows_, run}, padded(args.experts) * sizeof(float));
}

void Program::experts(const ExpertsArgs& args) {
  const auto gate_up = std::make_shared<Routed>(args.pairs, args.gate_up, 2);
  const auto down = std::make_shared<Routed>(args.pairs, args.down, 1);
  Op sort{rows_, [args, gate_up, down, count = rows_](const Rows& rows, int, int, void*, Ahead&) {
            sort_own_pairs(args.pairs, count.in(rows));
            gate_up->find_stretches();
            down->find_stretches();
          }};
  sort.is_joint = true;
  add("sort_pairs", std::move(sort));
  const auto gather = [args](const Rows&, int begin, int end, void*, Ahead&) {
    for (int pair = begin; pair < end; ++pair) copy_row(args.x, args.pairs.rows[pair], args.in, pair);
  };
  add("gather_pairs", {rows_, gather, args.pairs.top_k});
  add_gated_mlps(args, gate_up, down);
  add_combine(args.combine);
}

void Program::peer_experts(const PeerExpertsArgs& args, std::shared_ptr<ExpertPeers> peers) {
  const auto gate_up = std::make_shared<Routed>(args.own.pairs, args.own.gate_up, 2);
  const auto down = std::make_shared<Routed>(args.own.pairs, args.own.down, 1);
  const RowCount step_rows = rows_;
  const auto add_joint = [this](const char* name, std::function<void(const Rows&)> run) {
    rows_from(&kOne);
    Op op{rows_, [run = std::move(run)](const Rows& rows, int, int, void*, Ahead&) { run(rows); }};
    op.is_joint = true;
    add(name, std::move(op));
  };
  const auto offer = [args, peers](const Rows&, int begin, int end, void*, Ahead&) {
    const int top_k = args.own.pairs.top_k;
    for (int row = begin; row < end; ++row) copy_row(args.own.x, row, peers->rows(peers->rank()), row);
    std::copy(args.chosen + begin * top_k, args.chosen + end * top_k, peers->chosen(peers->rank()) + begin * top_k);
  };
  add("offer_rows", {rows_, offer});
  add_joint("meet_and_sort_pairs", [=, found = std::make_shared<std::vector<OwnPair>>()](const Rows& rows) {
    peers->num_rows(peers->rank()).store(step_rows.in(rows), std::memory_order_relaxed);
    peers->meet();
    *args.num_pairs = sort_pairs_of_all(args.own.pairs, *peers, args.first, *found);
    gate_up->find_stretches();
    down->find_stretches();
  });
  rows_from(args.num_pairs);
  const auto gather = [args, peers](const Rows&, int begin, int end, void*, Ahead&) {
    for (int at = begin; at < end; ++at) {
      const int pair = args.own.pairs.rows[at], rank = pair / peers->most_pairs();
      copy_row(peers->rows(rank), pair % peers->most_pairs() / args.own.pairs.top_k, args.own.in, at);
    }
  };
  add("gather_pairs", {rows_, gather});
  add_gated_mlps(args.own, gate_up, down);
  const auto give_back = [args, peers](const Rows&, int begin, int end, void*, Ahead&) {
    const int64_t width = args.own.down.outputs;
    for (int at = begin; at < end; ++at) {
      const int pair = args.own.pairs.rows[at], rank = pair / peers->most_pairs();
      const float* found = args.own.out + at * width;
      std::copy(found, found + width, peers->found(rank) + pair % peers->most_pairs() * width);
    }
  };
  add("give_back_pairs", {rows_, give_back});
  add_joint("meet", [peers](const Rows&) { peers->meet(); });
  rows_ = step_rows;
  add_combine(args.own.combine);
}

void Program::add_gated_mlps(const ExpertsArgs& args, std::shared_ptr<const Routed> gate_up, std::shared_ptr<const Routed> down) {
  add_routed("experts_gated", gate_up, [this, args, gate_up](int i, int rows, int first, int begin, int end, Ahead& ahead) {
    const Activation in = from_row(args.in, first), out = from_row(args.between, first);
    kernels_.gated({gate_up->weight(i), in, nullptr, args.activation, true, out}, rows, begin, end, ahead);
  });
  add_routed("experts_down", down, [this, args, down](int i, int rows, int first, int begin, int end, Ahead& ahead) {
    float* out = args.out + int64_t(first) * args.down.outputs;
    kernels_.linear({down->weight(i), from_row(args.between, first), nullptr, out}, rows, begin, end, ahead);
  });
}

void Program::add_combine(const CombineArgs& args) {
  const auto combine = [this, args](const Rows&, int begin, int end, void*, Ahead&) {
    kernels_.combine(args, begin, end);
  };
  add("combine", {rows_, combine});
}

void Program::add_routed(const char* name, std::shared_ptr<const Routed> routed, RunExpert run) {
  const auto each = [routed, run = std::move(run)](const Rows&, int begin, int end, void*, Ahead& ahead) {
    const int items = routed->num_items();
    for (int at = begin; at < end;) {
      const int expert = at / items, tile = at % items, count = std::min(items - tile, end - at);
      const int first = routed->pairs().starts[expert], last = routed->pairs().starts[expert + 1];
      run(expert, last - first, first, tile, tile + count, ahead);
      at += count;
    }
  };
  Op op{rows_, each, routed->num_items()};
  op.routed = std::move(routed);
  add(name, std::move(op));
}

}  // namespace specserve
