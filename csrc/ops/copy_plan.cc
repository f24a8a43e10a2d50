#include "ops/copy_plan.h"

#include <algorithm>
#include <limits>

#include "common/check.h"
#include "common/math.h"

namespace mk::ops {
namespace {

using kv::Axis;
using kv::kMaxAxes;
using kv::Side;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kSideFields = 6;
constexpr int64_t kHeader = 2 + 2 * kSideFields + 3 * kMaxAxes;

// Gives a side its ids; returns the number of pieces that they name.
int64_t set_ids(Side& side, const std::optional<Tensor>& ids, const char* name) {
  if (!ids) return std::numeric_limits<int64_t>::max();
  side.is_64_bit = ids->scalar_type() == ScalarType::Long;
  MK_CHECK(ids->dim() == 1 && ids->is_contiguous() &&
               (side.is_64_bit || ids->scalar_type() == ScalarType::Int),
           "copy_blocks: ", name, " must be a packed 1-d int32 or int64 tensor");
  side.ids = ids->data_ptr();
  MK_CHECK(side.ids || ids->numel() == 0, "copy_blocks: ", name,
           " must have memory, got a tensor whose storage was freed");
  return ids->numel() * side.pieces_per_id;
}

// Throws unless the pieces use every id of the side.
void check_count(const Side& side, int64_t num_pieces, const std::optional<Tensor>& ids,
                 const char* name) {
  const int64_t num_ids = ceil_div(num_pieces, side.pieces_per_id);
  MK_CHECK(!ids || ids->numel() == num_ids, "copy_blocks: ", name, " must have ", num_ids,
           " ids, got ", ids->numel());
}

// Branch-free, so that the compiler vectorizes it.
template <class Id>
bool all_good(const Id* ids, int64_t count, int64_t num_ids) {
  bool good = true;
  for (int64_t i = 0; i < count; ++i) good &= ids[i] >= kv::kHole && ids[i] < num_ids;
  return good;
}

bool all_good(const Side& side, int64_t num_pieces) {
  const int64_t count = ceil_div(num_pieces, side.pieces_per_id);
  if (!side.ids) return true;
  return side.is_64_bit ? all_good(static_cast<const int64_t*>(side.ids), count, side.num_ids)
                        : all_good(static_cast<const int32_t*>(side.ids), count, side.num_ids);
}

}  // namespace

CopyPlan::CopyPlan(const Tensor& plan, int64_t plane_fields)
    : values_(static_cast<const int64_t*>(plan.data_ptr())),
      planes_(values_ + kHeader),
      plane_fields_(plane_fields),
      num_planes_((plan.numel() - kHeader) / plane_fields) {
  const bool good = plan.scalar_type() == ScalarType::Long && plan.is_cpu() && plan.dim() == 1 &&
                    plan.is_contiguous() && plan.numel() >= kHeader &&
                    (plan.numel() - kHeader) % plane_fields == 0;
  MK_CHECK(good, "copy_blocks: plan must be an int64 CPU tensor that CopyPlan made");
}

Side CopyPlan::side(int index) const {
  const int64_t* v = values_ + 1 + kSideFields * index;
  MK_CHECK(v[2] > 0 && v[4] > 0, "copy_blocks: plan must be one that CopyPlan made");
  return {nullptr, false, v[0], v[1], v[2], v[3], v[4], v[5]};
}

int64_t CopyPlan::run_bytes() const { return values_[1 + 2 * kSideFields]; }

Axis CopyPlan::axis(int index) const {
  const int64_t* v = values_ + 2 + 2 * kSideFields + 3 * index;
  return {v[0], v[1], v[2]};
}

kv::CopyBlocksParams CopyPlan::params(const std::optional<Tensor>& src_ids,
                                      const std::optional<Tensor>& dst_ids) const {
  MK_CHECK(src_ids || dst_ids, "copy_blocks: src_blocks or dst_blocks must be given");
  kv::CopyBlocksParams p;
  p.src = side(0);
  p.dst = side(1);
  p.num_pieces =
      std::min(set_ids(p.src, src_ids, "src_blocks"), set_ids(p.dst, dst_ids, "dst_blocks"));
  check_count(p.src, p.num_pieces, src_ids, "src_blocks");
  check_count(p.dst, p.num_pieces, dst_ids, "dst_blocks");
  if (!src_ids) p.src.num_ids = ceil_div(p.num_pieces, p.src.pieces_per_id);
  if (!dst_ids) p.dst.num_ids = ceil_div(p.num_pieces, p.dst.pieces_per_id);
  p.run_bytes = run_bytes();
  for (int i = 0; i < kMaxAxes; ++i) p.axes[i] = axis(i);
  return p;
}

int64_t CopyPlan::reach(const Side& side, int64_t Axis::* stride, int64_t run_bytes) const {
  const int64_t num_blocks = side.num_ids / side.slots_per_block;
  int64_t bytes = (num_blocks - 1) * side.block_stride + run_bytes;
  bytes += (side.pieces_per_id - 1) * side.piece_stride;
  bytes += (side.slots_per_block - 1) * side.slot_stride;
  for (int i = 0; i < kMaxAxes; ++i) bytes += (axis(i).extent - 1) * axis(i).*stride;
  return num_blocks == 0 ? 0 : bytes;
}

void CopyPlan::check_ids(const kv::CopyBlocksParams& p, const char* gather_name) const {
  if (all_good(p.src, p.num_pieces) && all_good(p.dst, p.num_pieces)) return;
  for (int64_t piece = 0; piece < p.num_pieces; ++piece) {
    const kv::BadId bad = p.check(piece);
    if (bad.side == 0) continue;
    const bool by_slot = this->by_slot(), is_src = bad.side == 1;
    const char* name =
        !p.dst.ids   ? gather_name
        : !p.src.ids ? "scatter_blocks: block_ids"
        : by_slot    ? (is_src ? "CopyPlan.run_slots: src_slots" : "CopyPlan.run_slots: dst_slots")
        : is_src     ? "CopyPlan.run: src_blocks"
                     : "CopyPlan.run: dst_blocks";
    throw InvalidArgument(concat(name, "[", bad.index, "] must be -1 or in [0, ",
                                 (is_src ? p.src : p.dst).num_ids, "), got ", bad.id));
  }
}

}  // namespace mk::ops
