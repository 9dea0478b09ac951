// What the ops of a step are told: plain structs that every instruction set's kernels share.
//
// Float rows are padded to a multiple of 32 columns with zeros, and every kernel keeps those zeros.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace specserve {

// How numbers lie in memory, and in which order they are added, on every instruction set. The width of a machine's vectors
// is none of these: it is kLanes of simd_*.h.
constexpr int kTile = 32;         // outputs that packed weights hold interleaved
constexpr int kGroup = 32;        // inputs that share one scale
constexpr int kSlotGroup = 16;    // slots that a cache in groups holds interleaved
constexpr int kChunk = 64;        // logical tokens that attention reduces at a time
constexpr int kSegment = 512;     // and whose sums it adds to those of the segments before
constexpr int kPartialSums = 16;  // number i is added to partial sum i % kPartialSums; those then in halves, i and i + n

inline int64_t padded(int64_t n) { return (n + kTile - 1) / kTile * kTile; }

// How the inputs of a linear layer are stored; the weights of its layer decide.
enum class Kind : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };
enum class Format : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

// Rows ready for a linear layer: [rows, width] numbers; for int8 one scale and one sum of the integers a group.
struct Activation {
  Kind kind;
  int width;  // padded
  void* data;
  float* scales;   // [rows, width / kGroup]
  int32_t* sums;  // [rows, width / kGroup]
};

// Weights [outputs, inputs] by tiles of kTile outputs; see pack.h for the bytes of a tile.
struct Weight {
  Format format;
  int outputs, inputs;  // padded
  int64_t tile_bytes;
  const uint8_t* data;
};

// Weights that one thread reads, one tile after the other.
struct Stretch {
  const uint8_t *begin, *end;
};

// Where a thread asks memory for what it will read in a moment: some bytes ahead of its place, past the end of one op's
// stretch in the next op's, so that memory does not rest while threads wait for each other.
struct Ahead {
  const uint8_t *at, *end;
  const Stretch *next, *last;  // what follows
};

// One low-rank change of a weight, b a: `a` is packed as weights are, or of a table [vocab, rank]. Of `b` a tile of outputs
// has the ranks that it reads, [count, kTile] numbers each.
struct AdapterTile {
  int64_t first, count, start;  // ranks, and where its numbers begin
};
struct Adapter {
  int64_t rank;  // padded; 0: there is none
  const uint8_t* a;
  const AdapterTile* tiles;
  const uint8_t* b;
};

// The adapters that rows of an op have. A recording reads the bank anew in each run.
struct Adapters {
  const Adapter* bank;  // of each slot; null: the op takes none
  const int64_t* slots;  // [rows]; negative: none
  float* shrunk;        // [rows, stride] a x of rows that have one
  int stride;
  bool is_bfloat16;  // how b is stored, and a of a table: else float32

  const Adapter* of_row(int64_t row) const {
    const Adapter* found = slots[row] < 0 ? nullptr : bank + slots[row];
    return found && found->rank ? found : nullptr;
  }
};

struct LinearArgs {
  Weight weight;
  Activation x;
  const float* bias;  // [outputs], padded, or null
  float* out;         // [rows, outputs]
  Adapters adapters = {};  // whose a x are computed
};

// Computes a x of rows that have an adapter.
struct ShrinkArgs {
  Format format;  // of a
  Activation x;
  Adapters adapters;
};

// residual [rows, width] += scale * b a[ids].
struct EmbedAdaptersArgs {
  const int64_t* ids;
  float* residual;
  int width;
  float scale;
  Adapters adapters;
};

// How the cache holds keys and values; see context.h. Groups need a multiple of kSlotGroup slots and head_dim % kTile == 0.
enum class Number : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
struct Cache {
  Number number;
  bool in_groups;
};

enum class Nonlinear : int { kSilu = 0, kGeluTanh = 1, kRelu = 2, kGelu = 3 };

// weight alternates tiles of gate and up; or it is a layer that is activated and not gated.
struct GatedArgs {
  Weight weight;
  Activation x;
  const float* bias;
  Nonlinear activation;
  bool is_gated;
  Activation out;
  Adapters adapters = {};
};

// Of rows: x / rms(x) * weight, or (x - mean(x)) / deviation(x) * weight + bias.
struct Norm {
  const float* weight;  // padded, as bias; null: there is no norm
  const float* bias;    // or null
  bool subtracts_mean;
};

struct EmbedArgs {
  const int64_t* ids;
  const void* table;  // [vocab, hidden], bfloat16 or float32
  bool is_bfloat16;
  int hidden, width;
  float scale;
  const int64_t* positions;    // of learned vectors that are added, or null
  const void* position_table;  // [any, hidden], like table
  Norm norm;
  float eps;
  float* out;  // [rows, width]
};

// residual += delta, its RMS normed first if there is post_weight; out is the norm of residual, or residual if it has none.
struct FusedAddNormArgs {
  float* residual;
  const float* delta;        // or null
  const float* post_weight;  // or null
  Norm norm;
  float eps;
  int hidden, width;
  Activation out;
};

// Several [rows, width], each normed where it has a weight, side by side.
struct JoinedNormsArgs {
  struct Part {
    const float* x;
    const float* weight;  // or null
    int n, width;
  };
  std::vector<Part> parts;
  float eps;
  Activation out;
};

// x [rows, stride] in place: the RMS norm of its first q numbers, and of the k after them.
struct NormProjectionsArgs {
  float* x;
  int stride, q, k;
  const float* q_norm;  // padded
  const float* k_norm;
  float eps;
};

// out = residual[rows] + delta[rows], as FusedAddNormArgs has it.
struct GatherRowsArgs {
  const int64_t* rows;
  const float* residual;
  const float* delta;
  const float* post_weight;
  float eps;
  int hidden, width;
  float* out;
};

struct RopeAndCacheArgs {
  const float* qkv;  // [rows, stride]: q heads, k heads, v heads
  int stride, heads, kv_heads, head_dim;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float eps;
  const int64_t* positions;
  const float* cos;  // [max_len, head_dim]
  const float* sin;
  float* q;  // [rows, q_stride]
  int q_stride;
  Cache cache;
  void *keys, *values;
};

// Rows [first, last) of the step belong to one sequence; its row r (from 0) lies at logical index cached + r. In a tree row
// r sees, after the cached tokens, rows paths[path_starts[r]] to paths[path_starts[r + 1] - 1], the last of them itself. In a
// block every row sees all of them.
struct Span {
  int first, last, cached;
  int block_size;
  const int32_t* blocks;
  const int32_t* paths;  // null: a chain, in which row r sees rows 0 to r
  const int32_t* path_starts;
  bool is_block;
};

struct AttentionArgs {
  const float* q;
  int q_stride, heads, kv_heads, head_dim;
  Cache cache;
  const void* keys;
  const void* values;
  float scale;
  const float* slopes;  // [heads] of ALiBi, or null
  int window;      // 0: none
  Activation out;  // float32 if one kv head's share of a row is not a multiple of kTile
};

struct QuantizeActivationArgs {
  const float* x;
  int width;
  Activation out;
};

// Which experts rows go to: the top_k with the highest scores, of equals the first.
struct RouteArgs {
  const float* scores;  // [rows, width], those of the experts, then perhaps that of what all rows go through
  int width, experts, top_k;
  bool is_normalized;  // weights are a softmax over a row's experts, not a part of one over all
  int32_t* chosen;     // [rows, top_k], the highest score first
  float* weights;      // [rows, top_k]
  float* share;        // [rows], the sigmoid of the score after the experts', or null
};

// Pairs of a row and an expert, by expert and then by row.
struct Pairs {
  const int32_t* chosen;  // [rows, top_k], of experts
  int experts, top_k;
  int64_t* num_active;  // experts that have pairs
  int32_t* active;      // [experts] those, ascending
  int32_t* starts;      // [experts + 1] the first pair of each of those, and how many there are
  int32_t* rows;        // [rows * top_k] of each pair
  int32_t* of_row;      // [rows, top_k] where each row's pairs are, as `chosen` has them
};

// out = the sum of a row's pairs of x [pairs, width], in order, times their weights; and of `shared` times its share.
struct CombineArgs {
  const float* x;
  int width, top_k;
  const int32_t* pairs;  // [rows, top_k]
  const float* weights;  // [rows, top_k]
  const float* shared;   // [rows, width] or null
  const float* share;    // [rows]; null: 1
  float* out;            // [rows, width]
};

// Gated MLPs; those of the other experts follow the weights of the first.
struct ExpertsArgs {
  Pairs pairs;
  Activation x;        // [rows]
  Activation in;       // [pairs], the same by pairs
  Weight gate_up;      // as GatedArgs has it
  Nonlinear activation;
  Activation between;  // [pairs]
  Weight down;
  float* out;          // [pairs, down.outputs]
  CombineArgs combine;
};

// Some of a model's experts, `first` and those after it, for the rows of several replicas. `own` has their weights, and
// room for as many pairs as all replicas' rows may have, which `rows` of its pairs tell as ExpertPeers lays them down;
// `combine` adds up this replica's own rows.
struct PeerExpertsArgs {
  const int32_t* chosen;  // [rows, top_k] of this replica's rows, of all experts
  int first;
  int64_t* num_pairs;     // of its experts, in the step that runs
  ExpertsArgs own;
};

// Row i is sampled from scores[rows[i]]; `hashed` are the vocabulary's token ids as sampling/noise.py hashes them.
struct SampleArgs {
  const float* scores;
  int64_t stride;
  int vocab;
  const int64_t* rows;
  const double *temperature, *min_p, *top_p;  // temperature 0: greedy
  const int64_t* top_k;                       // 0: all
  const int64_t *keys, *hashed;
  const int32_t* masks;  // [all rows, (vocab + 31) / 32], bits of the tokens that may come; or null
};

enum Verification { kCoupled, kRejection, kBlock };

// Drafts of several sequences, as specserve/ops has them: rows from starts[s] on are for what follows the last token of
// sequence s, then each node of its draft.
struct VerifyArgs {
  const float* scores;  // [rows or more, stride]
  int64_t stride;
  int vocab, num_seqs;
  const int64_t* best;    // [rows or more], of the logits; negative: the row is broken
  const int64_t* hashed;  // [vocab]
  const int32_t* masks;   // [rows, (vocab + 31) / 32] or null
  const int64_t* starts;  // [num_seqs + 1]
  const int64_t *tokens, *parents, *positions;  // [rows]
  const int64_t *seeds, *top_k, *is_edited;     // [num_seqs]
  const double *temperature, *min_p, *top_p;    // [num_seqs]
  const double* const* q;                       // [num_seqs] of nodes and tokens, null: one-hot
  Verification verification;
  int64_t *said, *nodes;  // [rows], zeros
  int64_t* counts;        // [num_seqs], zeros
};

// Row i is drawn from logits[rows[i]] + bias[i], whose entry j is token ids[j]: the best where its temperature is 0, else
// with noise; `second` is the next best. A share is that of e^score, with its noise, at that temperature, or at 1 where it is
// 0. It is 0, and the token any, where there is none, as scores are not finite.
struct DrawArgs {
  const float* logits;  // [any, width]
  const int64_t* rows;
  const float* bias;    // [rows, bias_width] or null
  int width, bias_width, n;
  const int64_t *ids, *hashed;  // [n]; `ids` null: entry j is token j
  const double* temperature;
  const int64_t* keys;
  int64_t *tokens, *second;
  float *share, *second_share;
};

// Row i of x [rows, width], whose best token is best[i]; where that is negative, so are all of its `tokens`.
struct TopKArgs {
  const float* x;
  int width, vocab, k;  // k at most vocab and kMostTopK
  const int64_t* best;
  int32_t* tokens;  // [rows, k], best first, of equals the lower one
};

constexpr int kMostTopK = 16;

// Entry i is about scores[rows[i]]: what tells how likely tokens[i] and the k best are.
struct ScoreArgs {
  const float* scores;
  int64_t stride;
  int vocab;
  const int64_t *rows, *tokens;
  int k;              // at most vocab
  double unit;        // what 1 is as an integer in `total`: a power of two, at most 2^50
  float* peak;        // [n], the highest score; NaN where the row holds one
  int64_t* total;     // [n], the sum of e^(score - peak), each rounded to an integer; only where the peak is finite
  int64_t* ranks;     // [n], 1 and how many scores are higher than the token's
  int64_t* best;      // [n, k], best first, of equals the lower token
  float* logits;      // [n, 1 + k], the token's own score and those of the best
};

// A thread's own, [padded(vocab)] each.
struct SampleScratch {
  float *weights, *candidates, *scores;
  int32_t* tokens;
};

// One instruction set's kernels. Those with [begin, end) compute these rows, tiles or items; `scratch` is the calling
// thread's own, of at least scratch_bytes.
struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&, int rows, int begin, int end, Ahead&);
  void (*gated)(const GatedArgs&, int rows, int begin, int end, Ahead&);
  // Of `rows` rows: item i is tile i / rows of a, and row i % rows.
  void (*shrink)(const ShrinkArgs&, int rows, int begin, int end);
  void (*embed_adapters)(const EmbedAdaptersArgs&, int begin, int end);
  void (*embed)(const EmbedArgs&, int begin, int end);
  void (*fused_add_norm)(const FusedAddNormArgs&, int begin, int end, float* scratch);
  void (*joined_norms)(const JoinedNormsArgs&, int begin, int end, float* scratch);
  void (*norm_projections)(const NormProjectionsArgs&, int begin, int end, float* scratch);
  void (*gather_rows)(const GatherRowsArgs&, int begin, int end);
  // broken[row] is set where a key or a value is not finite.
  void (*rope_and_cache)(const RopeAndCacheArgs&, const int64_t* slots, std::atomic<bool>* broken, int begin, int end, float* scratch);
  // Rows [begin, end) of a span, at most kRowBlock. The same in parts, which give the same bits: what each segment of the
  // context comes to, in any order, and then all of them, which lie one after the other.
  void (*attention)(const AttentionArgs&, const Span&, int begin, int end, int kv_head, void* scratch, Ahead&);
  void (*attention_segment)(const AttentionArgs&, const Span&, int begin, int end, int kv_head, int segment, float* part,
                            void* scratch, Ahead&);
  void (*merge_segments)(const AttentionArgs&, const Span&, int begin, int end, int kv_head, int segments, float* parts,
                         void* scratch);
  void (*quantize_activation)(const QuantizeActivationArgs&, int begin, int end);
  void (*softcap)(float* x, int width, float cap, int begin, int end);
  int (*sample)(const SampleArgs&, int row, const SampleScratch&);
  void (*probabilities)(const SampleArgs&, int row, const SampleScratch&, double* p);
  double (*total)(const double* x, int n);  // of numbers from 0 on, at most 2 together
  double (*reject)(double* p, int vocab, double weight, int token, const double* q, double q_total);
  int (*sample_from)(const double* p, int vocab, uint64_t key, const int64_t* hashed);
  void (*score)(const ScoreArgs&, int begin, int end);
  void (*argmax)(const float* x, int width, int n, int64_t* best, int begin, int end);
  void (*top_k)(const TopKArgs&, int begin, int end);
  void (*draw)(const DrawArgs&, int begin, int end, float* scratch);  // scratch for two rows of scores
  void (*route)(const RouteArgs&, int begin, int end, float* scratch);  // scratch for a row of scores
  void (*combine)(const CombineArgs&, int begin, int end);
};

constexpr int kRowBlock = 64;  // rows of one sequence that one call of attention computes, at most
constexpr int kMaxHead = 1024;  // head_dim, at most

// Bytes of scratch that attention needs for kRowBlock rows.
int64_t attention_scratch_bytes(int share, int head_dim);

// Floats of a segment's part of so many queries (rows times heads).
inline int64_t part_floats(int64_t queries, int head_dim) { return queries * (padded(head_dim) + 2); }

}  // namespace specserve
