// What Python sees: addresses and shapes in, nothing checked twice. kernels/cpu.py owns the memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bandwidth.h"
#include "isa.h"
#include "pack.h"
#include "pauses.h"
#include "program.h"
#include "verify.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace specserve {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

using NormAddresses = std::tuple<Address, Address, bool>;  // as Norm

Norm norm_at(const NormAddresses& norm) {
  const auto& [weight, bias, subtracts_mean] = norm;
  return {at<float>(weight), at<float>(bias), subtracts_mean};
}

// array[to[i]] = array[from[i]]; all are read before any is written.
template <class T>
void copy_numbers(T* array, const int64_t* from, const int64_t* to, int64_t n) {
  std::vector<T> read(n);
  for (int64_t i = 0; i < n; ++i) read[i] = array[from[i]];
  for (int64_t i = 0; i < n; ++i) array[to[i]] = read[i];
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported_kernels()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& kernels_named(const std::string& name) {
  for (const Kernels* kernels : supported_kernels())
    if (kernels->name == name) return *kernels;
  throw std::invalid_argument("this machine has no instruction set " + name);
}

Weight weight(int format, int outputs, int inputs, Address data) {
  return {Format(format), int(padded(outputs)), int(padded(inputs)), tile_bytes(Format(format), inputs), at<uint8_t>(data)};
}

Activation activation(int kind, int width, Address data, Address scales, Address sums) {
  return {Kind(kind), int(padded(width)), at<void>(data), at<float>(scales), at<int32_t>(sums)};
}

Adapters adapters(Address bank, Address slots, Address shrunk, int stride, bool is_bfloat16) {
  return {at<Adapter>(bank), at<int64_t>(slots), at<float>(shrunk), stride, is_bfloat16};
}

// Threads may still read a plan that Python has let go of.
struct SharedPlan {
  std::shared_ptr<const Plan> plan;
};

std::shared_ptr<const Plan> of(const SharedPlan* shared) { return shared ? shared->plan : nullptr; }

// What Python holds. Its end waits for the pool's threads, and Python's other threads go on meanwhile.
struct PythonProgram : Program {
  using Program::Program;
  ~PythonProgram() {
    nb::gil_scoped_release others_go_on;
    close();
  }
};

void bind_program(nb::module_& m) {
  using Program = PythonProgram;
  nb::class_<Program>(m, "Program")
      .def("__init__", [](Program* self, std::shared_ptr<ThreadPool> pool, const std::string& isa) {
        new (self) Program(std::move(pool), kernels_named(isa));
      })
      .def("embed",
           [](Program& p, Address ids, Address table, bool is_bfloat16, int hidden, float scale, Address positions,
              Address position_table, const NormAddresses& norm, float eps, Address out) {
             p.embed({at<int64_t>(ids), at<void>(table), is_bfloat16, hidden, int(padded(hidden)), scale, at<int64_t>(positions),
                      at<void>(position_table), norm_at(norm), eps, at<float>(out)});
           })
      .def("fused_add_norm",
           [](Program& p, Address residual, Address delta, Address post, const NormAddresses& norm, float eps, int hidden,
              const Activation& out) {
             p.fused_add_norm({at<float>(residual), at<float>(delta), at<float>(post), norm_at(norm), eps, hidden,
                     int(padded(hidden)), out});
           })
      .def("joined_norms",
           [](Program& p, const std::vector<std::tuple<Address, Address, int>>& parts, float eps, const Activation& out) {
             JoinedNormsArgs args{{}, eps, out};
             for (const auto& [x, weight, n] : parts) args.parts.push_back({at<float>(x), at<float>(weight), n, int(padded(n))});
             p.joined_norms(args);
           })
      .def("norm_projections",
           [](Program& p, Address qkv, int stride, int q, int k, Address q_norm, Address k_norm, float eps) {
             p.norm_projections({at<float>(qkv), stride, q, k, at<float>(q_norm), at<float>(k_norm), eps});
           })
      .def("gather_rows",
           [](Program& p, Address rows, Address residual, Address delta, Address post, float eps, int hidden, Address out) {
             p.gather_rows({at<int64_t>(rows), at<float>(residual), at<float>(delta), at<float>(post), eps, hidden,
                        int(padded(hidden)), at<float>(out)});
           })
      .def("tap",
           [](Program& p, Address rows, Address residual, Address delta, Address post, float eps, int hidden, Address out) {
             p.tap({at<int64_t>(rows), at<float>(residual), at<float>(delta), at<float>(post), eps, hidden,
                    int(padded(hidden)), at<float>(out)});
           })
      .def("linear", [](Program& p, const Weight& w, const Activation& x, Address bias, Address out,
                        const Adapters& adapters) { p.linear({w, x, at<float>(bias), at<float>(out), adapters}); })
      .def("gated",
           [](Program& p, const Weight& w, const Activation& x, Address bias, int activation, bool is_gated,
              const Activation& out, const Adapters& adapters) {
             p.gated({w, x, at<float>(bias), Nonlinear(activation), is_gated, out, adapters});
           })
      .def("find_adapters",
           [](Program& p, Address slots, Address any) { p.find_adapters(at<int64_t>(slots), at<int64_t>(any)); })
      .def("shrink",
           [](Program& p, int format, const Activation& x, const Adapters& adapters, Address any) {
             p.shrink({Format(format), x, adapters}, at<int64_t>(any));
           })
      .def("embed_adapters",
           [](Program& p, Address ids, Address residual, int hidden, float scale, const Adapters& adapters, Address any) {
             p.embed_adapters({at<int64_t>(ids), at<float>(residual), int(padded(hidden)), scale, adapters}, at<int64_t>(any));
           })
      .def("rope_and_cache",
           [](Program& p, Address qkv, int heads, int kv_heads, int head_dim, Address q_norm, Address k_norm, float eps,
              Address positions, Address cos, Address sin, Address q, int number, bool in_groups, Address keys, Address values) {
             p.rope_and_cache({at<float>(qkv), int(padded((heads + 2 * kv_heads) * head_dim)), heads, kv_heads, head_dim,
                       at<float>(q_norm), at<float>(k_norm), eps, at<int64_t>(positions), at<float>(cos), at<float>(sin),
                       at<float>(q), int(padded(heads * head_dim)), {Number(number), in_groups}, at<void>(keys), at<void>(values)});
           })
      .def("attention",
           [](Program& p, Address q, int heads, int kv_heads, int head_dim, int number, bool in_groups, Address keys,
              Address values, float scale, Address slopes, int window, const Activation& out) {
             p.attention({at<float>(q), int(padded(heads * head_dim)), heads, kv_heads, head_dim, {Number(number), in_groups},
                          at<void>(keys), at<void>(values), scale, at<float>(slopes), window, out});
           })
      .def("quantize_activation",
           [](Program& p, Address x, const Activation& out) { p.quantize_activation({at<float>(x), out.width, out}); })
      .def("softcap", [](Program& p, Address x, int width, float cap) { p.softcap(at<float>(x), int(padded(width)), cap); })
      .def("route",
           [](Program& p, Address scores, int experts, bool has_share, int top_k, bool is_normalized, Address chosen,
              Address weights, Address share) {
             p.route({at<float>(scores), int(padded(experts + has_share)), experts, top_k, is_normalized, at<int32_t>(chosen),
                      at<float>(weights), at<float>(share)});
           })
      // `order` has 2 * experts + 1 numbers and two for each of max_rows * top_k pairs.
      .def("experts",
           [](Program& p, Address chosen, Address weights, Address share, Address shared, int experts, int top_k,
              int max_rows, Address num_active, Address order, const Activation& x, const Activation& in,
              const Weight& gate_up, int activation, const Activation& between, const Weight& down, Address pairs_out,
              Address out) {
             int32_t *active = at<int32_t>(order), *rows = active + 2 * experts + 1, *of_row = rows + int64_t(max_rows) * top_k;
             const Pairs pairs{at<int32_t>(chosen), experts, top_k, at<int64_t>(num_active),
                               active, active + experts, rows, of_row};
             const CombineArgs combine{at<float>(pairs_out), down.outputs, top_k, of_row, at<float>(weights),
                                       at<float>(shared), at<float>(share), at<float>(out)};
             p.experts({pairs, x, in, gate_up, Nonlinear(activation), between, down, at<float>(pairs_out), combine});
           })
      // As `experts`, where `order` has 2 * experts + 1 numbers, one for each of most_pairs pairs, and 0, 1, 2 and so on, one
      // for each of the replica's own.
      .def("peer_experts",
           [](Program& p, std::shared_ptr<ExpertPeers> peers, Address chosen, Address weights, Address share, Address shared,
              int first, int experts, int top_k, Address num_active, Address num_pairs, Address order, int64_t most_pairs,
              const Activation& x, const Activation& in, const Weight& gate_up, int activation, const Activation& between,
              const Weight& down, Address pairs_out, Address out) {
             int32_t *active = at<int32_t>(order), *rows = active + 2 * experts + 1, *of_row = rows + most_pairs;
             const Pairs pairs{nullptr, experts, top_k, at<int64_t>(num_active), active, active + experts, rows, of_row};
             const CombineArgs combine{peers->found(peers->rank()), down.outputs, top_k, of_row, at<float>(weights),
                                       at<float>(shared), at<float>(share), at<float>(out)};
             const ExpertsArgs own{pairs, x, in, gate_up, Nonlinear(activation), between, down, at<float>(pairs_out), combine};
             p.peer_experts({at<int32_t>(chosen), first, at<int64_t>(num_pairs), own}, std::move(peers));
           })
      .def("share_broken", [](Program& p, std::shared_ptr<Peers> peers) { p.share_broken(std::move(peers)); })
      .def("sum_peers", [](Program& p, std::shared_ptr<Peers> peers, Address x, int width) {
        p.sum_peers(std::move(peers), at<float>(x), width);
      })
      .def("gather_peers",
           [](Program& p, std::shared_ptr<Peers> peers, Address x, int stride, const std::vector<int64_t>& widths, Address out,
              int out_stride) {
             p.gather_peers(std::move(peers), at<float>(x), stride, widths, at<float>(out), out_stride);
           })
      .def("rows_from", [](Program& p, Address count) { p.rows_from(at<int64_t>(count)); })
      .def("argmax", [](Program& p, Address x, int n, Address best) { p.argmax(at<float>(x), n, at<int64_t>(best)); })
      .def("top_k", [](Program& p, Address x, int n, int k, Address best, Address tokens) {
        p.top_k({at<float>(x), int(padded(n)), n, k, at<int64_t>(best), at<int32_t>(tokens)});
      })
      .def("draw",
           [](Program& p, Address logits, int width, Address rows, Address bias, int n, Address ids, Address hashed,
              Address temperature, Address keys, Address tokens, Address second, Address share, Address second_share) {
             p.draw({at<float>(logits), at<int64_t>(rows), at<float>(bias), width, int(padded(n)), n, at<int64_t>(ids),
                     at<int64_t>(hashed), at<double>(temperature), at<int64_t>(keys), at<int64_t>(tokens),
                     at<int64_t>(second), at<float>(share), at<float>(second_share)});
           })
      .def(
          "run",
          [](Program& p, int rows, int gathered, const SharedPlan* plan) { p.run({rows, gathered, of(plan)}); },
          "rows"_a, "gathered"_a = 0, "plan"_a = nb::none(), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "start",
          [](Program& p, int rows, int gathered, const SharedPlan* plan) { p.start({rows, gathered, of(plan)}); },
          "rows"_a, "gathered"_a = 0, "plan"_a = nb::none(), nb::call_guard<nb::gil_scoped_release>())
      .def("finish", [](Program& p) { p.finish(); }, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "profile",
          [](Program& p, int rows, int gathered, const SharedPlan* plan) { return p.profile({rows, gathered, of(plan)}); },
          "rows"_a, "gathered"_a = 0, "plan"_a = nb::none(), nb::call_guard<nb::gil_scoped_release>())
      .def("names", [](const Program& p) { return std::vector<std::string>(p.names().begin(), p.names().end()); });
}

}  // namespace
}  // namespace specserve

NB_MODULE(_native, m) {
  using namespace specserve;
  m.doc() = "Kernels of specserve for CPUs.";
  nb::set_leak_warnings(false);  // an engine that lives until the process ends is nobody's mistake
  m.def("instruction_sets", &instruction_sets);
  m.def("tile_bytes", [](int format, int inputs) { return tile_bytes(Format(format), inputs); });
  m.def("pack",
        [](int format, Address rows, int outputs, int inputs, Address out) {
          pack(Format(format), at<float>(rows), outputs, inputs, at<uint8_t>(out));
        },
        nb::call_guard<nb::gil_scoped_release>());
  m.def("pack_groups",
        [](int format, Address numbers, Address scales, Address minima, int outputs, int inputs, Address out) {
          pack_groups(Format(format), at<uint8_t>(numbers), at<uint16_t>(scales), at<uint16_t>(minima), outputs, inputs,
                      at<uint8_t>(out));
        },
        nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Weight>(m, "Weight").def_ro("outputs", &Weight::outputs).def_ro("inputs", &Weight::inputs);
  nb::class_<Activation>(m, "Activation").def_ro("width", &Activation::width);
  using Places = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def("copy_numbers", [](const std::vector<Address>& arrays, const Places& from, const Places& to, int bytes) {
    const int64_t n = int64_t(from.size());
    for (const Address array : arrays)
      bytes == 2 ? copy_numbers(at<uint16_t>(array), from.data(), to.data(), n)
                 : copy_numbers(at<uint32_t>(array), from.data(), to.data(), n);
  });
  m.def("weight", &weight);
  m.def("activation", &activation);
  nb::class_<Adapters>(m, "Adapters").def(nb::init<>());
  m.def("adapters", &adapters);
  nb::class_<PrefetchChoice>(m, "PrefetchChoice")
      .def(nb::init<>())
      .def("next", &PrefetchChoice::next)
      .def("took", &PrefetchChoice::took)
      .def_prop_ro("is_on", &PrefetchChoice::is_on);
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>())
      .def_prop_ro("threads", &ThreadPool::threads)
      .def("set_pulse", [](ThreadPool& pool, Address counter) { pool.set_pulse(at<uint64_t>(counter)); });
  nb::class_<Peers>(m, "Peers")
      .def("__init__",
           [](Peers* self, Address memory, int rank, int count, int64_t bytes, std::optional<Peers::Gather> gather) {
             new (self) Peers(at<void>(memory), rank, count, bytes, gather.value_or(nullptr));
           },
           "memory"_a, "rank"_a, "count"_a, "bytes"_a, "gather"_a = nb::none())
      .def_static("size", &Peers::size)
      .def_static("place_at", &Peers::place_at)
      .def("leave", &Peers::leave)
      .def_prop_ro("has_left", &Peers::has_left);
  nb::class_<ExpertPeers>(m, "ExpertPeers")
      .def("__init__",
           [](ExpertPeers* self, Address memory, int rank, int count, int max_rows, int per_token, int kind, int width, int outputs) {
             const ExpertPeers::Sizes sizes{max_rows, per_token, Kind(kind), int(padded(width)), int(padded(outputs))};
             new (self) ExpertPeers(at<void>(memory), rank, count, sizes);
           })
      .def_static("size",
                  [](int count, int max_rows, int per_token, int kind, int width, int outputs) {
                    const ExpertPeers::Sizes sizes{max_rows, per_token, Kind(kind), int(padded(width)), int(padded(outputs))};
                    return ExpertPeers::size(count, sizes);
                  })
      .def("leave", &ExpertPeers::leave)
      .def_prop_ro("has_left", &ExpertPeers::has_left);
  m.def("read_bandwidth",
        [](ThreadPool& pool, Address memory, int64_t bytes, int passes) {
          return read_bandwidth(pool, at<uint8_t>(memory), bytes, passes);
        },
        nb::call_guard<nb::gil_scoped_release>());
  m.def("pause_often", &pause_often);
  m.def("pause_no_more", &pause_no_more);
  using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using Tables = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  nb::class_<SharedPlan>(m, "Plan")
      .def("__init__", [](SharedPlan* self, const Ids& starts, const Ids& cached, const Tables& tables, const Ids& parents,
                          int block_size, int max_rows_per_block) {
        const StepRows rows{int(cached.size()), int(tables.shape(1)), starts.data(), cached.data(), tables.data(), parents.data()};
        new (self) SharedPlan{std::make_shared<const Plan>(rows, block_size, max_rows_per_block)};
      })
      .def("broken_rows", [](const SharedPlan& shared) {
        std::vector<int> rows;
        for (int row = 0; row < shared.plan->rows(); ++row)
          if (shared.plan->broken()[row].load(std::memory_order_relaxed)) rows.push_back(row);
        return rows;
      });
  using Int64s = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
  using Float64s = nb::ndarray<const double, nb::c_contig, nb::device::cpu>;
  using Out = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  nb::class_<Verifier>(m, "Verifier")
      .def("__init__",
           [](Verifier* self, std::shared_ptr<ThreadPool> pool, const std::string& isa) {
             new (self) Verifier(std::move(pool), kernels_named(isa));
           })
      .def(
          "verify",
          [](Verifier& verifier, Address scores, int64_t stride, int vocab, Address best, Address hashed, Address masks,
             const Int64s& starts, const Int64s& rows, const Int64s& seqs, const Float64s& laws,
             const std::vector<std::pair<int, Address>>& q, int verification, const Out& out) {
            const int num_seqs = int(starts.size()) - 1;
            const size_t num_rows = rows.size() / 3;
            std::vector<const double*> drafted(num_seqs);
            for (const auto& [seq, address] : q) drafted[seq] = at<double>(address);
            const VerifyArgs args{at<float>(scores), stride, vocab, num_seqs, at<int64_t>(best), at<int64_t>(hashed),
                                  at<int32_t>(masks), starts.data(), rows.data(), rows.data() + num_rows,
                                  rows.data() + 2 * num_rows, seqs.data(), seqs.data() + num_seqs,
                                  seqs.data() + 2 * num_seqs, laws.data(), laws.data() + num_seqs,
                                  laws.data() + 2 * num_seqs, drafted.data(), Verification(verification), out.data(),
                                  out.data() + num_rows, out.data() + 2 * num_rows};
            nb::gil_scoped_release others_go_on;
            verifier.verify(args);
          })
      .def(
          "score",
          [](Verifier& verifier, Address scores, int64_t stride, int vocab, int count, Address rows, Address tokens, int k,
             double unit, Address peak, Address total, Address ranks, Address best, Address logits) {
            verifier.score({at<float>(scores), stride, vocab, at<int64_t>(rows), at<int64_t>(tokens), k, unit,
                            at<float>(peak), at<int64_t>(total), at<int64_t>(ranks), at<int64_t>(best), at<float>(logits)},
                           count);
          },
          nb::call_guard<nb::gil_scoped_release>());
  bind_program(m);
}
