#include "expert_peers.h"

namespace specserve {
namespace {

constexpr int64_t kPage = 4096;  // places begin at pages, so that what nobody writes to takes no memory

int64_t paged(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

int64_t bytes_of(Kind kind) { return kind == Kind::kFloat32 ? 4 : kind == Kind::kBfloat16 ? 2 : 1; }

}  // namespace

ExpertPeers::ExpertPeers(void* memory, int rank, int count, const Sizes& sizes)
    : memory_((uint8_t*)memory), meeting_(memory, rank, count), rank_(rank), count_(count), sizes_(sizes), place_(place_of(sizes)) {}

int64_t ExpertPeers::size(int count, const Sizes& sizes) {
  return paged(Meeting::size(count)) + count * place_of(sizes).size;
}

ExpertPeers::Place ExpertPeers::place_of(const Sizes& sizes) {
  const int64_t rows = sizes.max_rows, pairs = rows * sizes.per_token, groups = sizes.kind == Kind::kInt8 ? sizes.width / kGroup : 0;
  Place place{};
  place.chosen = kPage;
  place.data = place.chosen + paged(pairs * int64_t(sizeof(int32_t)));
  place.scales = place.data + paged(rows * sizes.width * bytes_of(sizes.kind));
  place.sums = place.scales + paged(rows * groups * int64_t(sizeof(float)));
  place.found = place.sums + paged(rows * groups * int64_t(sizeof(int32_t)));
  place.size = place.found + paged(pairs * sizes.outputs * int64_t(sizeof(float)));
  return place;
}

uint8_t* ExpertPeers::part(int rank) const { return memory_ + paged(Meeting::size(count_)) + rank * place_.size; }

Activation ExpertPeers::rows(int rank) const {
  uint8_t* at = part(rank);
  return {sizes_.kind, sizes_.width, at + place_.data, (float*)(at + place_.scales), (int32_t*)(at + place_.sums)};
}

int32_t* ExpertPeers::chosen(int rank) const { return (int32_t*)(part(rank) + place_.chosen); }

std::atomic<int32_t>& ExpertPeers::num_rows(int rank) const { return *(std::atomic<int32_t>*)part(rank); }

float* ExpertPeers::found(int rank) const { return (float*)(part(rank) + place_.found); }

}  // namespace specserve
