// Mixtures of experts: pairs of a row and an expert, by expert, so that an expert's weights are read once for all its rows
// and those of the others not at all.
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

// By counting: an expert's pairs are in the order of the rows.
void sort_pairs(const Pairs& pairs, int rows) {
  const int count = rows * pairs.top_k;
  int32_t* next = pairs.starts;  // of each expert: first how many there are, then where its next one goes
  std::fill(next, next + pairs.experts, 0);
  for (int i = 0; i < count; ++i) ++next[pairs.chosen[i]];
  int start = 0, active = 0;
  for (int expert = 0; expert < pairs.experts; ++expert) {
    const int own = std::exchange(next[expert], start);
    if (own) pairs.active[active++] = expert;
    start += own;
  }
  for (int i = 0; i < count; ++i) {
    const int at = next[pairs.chosen[i]]++;
    pairs.rows[at] = i / pairs.top_k;
    pairs.of_row[i] = at;
  }
  // Now each `next` is where the following expert's begin; those without pairs are left out.
  for (int i = 0; i < active; ++i) pairs.starts[i] = next[pairs.active[i]];
  for (int i = active; i > 0; --i) pairs.starts[i] = pairs.starts[i - 1];
  pairs.starts[0] = 0;
  *pairs.num_active = active;
}

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
            sort_pairs(args.pairs, count.in(rows));
            gate_up->find_stretches();
            down->find_stretches();
          }};
  sort.is_joint = true;
  add("sort_pairs", std::move(sort));
  const auto gather = [args](const Rows&, int begin, int end, void*, Ahead&) {
    for (int pair = begin; pair < end; ++pair) copy_row(args.x, args.pairs.rows[pair], args.in, pair);
  };
  add("gather_pairs", {rows_, gather, args.pairs.top_k});
  add_routed("experts_gated", gate_up, [this, args, gate_up](int i, int rows, int first, int begin, int end, Ahead& ahead) {
    const Activation in = from_row(args.in, first), out = from_row(args.between, first);
    kernels_.gated({gate_up->weight(i), in, nullptr, args.activation, true, out}, rows, begin, end, ahead);
  });
  add_routed("experts_down", down, [this, args, down](int i, int rows, int first, int begin, int end, Ahead& ahead) {
    float* out = args.out + int64_t(first) * args.down.outputs;
    kernels_.linear({down->weight(i), from_row(args.between, first), nullptr, out}, rows, begin, end, ahead);
  });
  const auto combine = [this, args = args.combine](const Rows&, int begin, int end, void*, Ahead&) {
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
