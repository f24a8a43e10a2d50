// A copy's plan: named access to the int64 CPU tensor that mooncake_kernels/kv/layout.py makes.
//
//   whether ids are slots,
//   for src and dst (num_ids, block_stride, pieces_per_id, piece_stride, slots_per_block,
//   slot_stride), run_bytes, kMaxAxes x (extent, src_stride, dst_stride),
//   and for each plane (src tensor, src offset, dst tensor, dst offset), offsets in bytes,
//   or, once the plan is resolved, (src address, dst address).
//
// Layer: ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "kv/copy_blocks.h"

namespace mk::ops {

class CopyPlan {
 public:
  static constexpr int64_t kPlaneFields = 4;
  static constexpr int64_t kResolvedFields = 2;

  // The tensor must outlive the plan. Throws InvalidArgument if it is not a plan.
  CopyPlan(const torch::stable::Tensor& plan, int64_t plane_fields);

  int64_t num_planes() const { return num_planes_; }
  const int64_t* plane(int64_t index) const { return planes_ + plane_fields_ * index; }

  // Everything but the planes. A side without ids takes its blocks in order. Throws InvalidArgument
  // if the two sides' ids do not cover the same number of tokens.
  kv::CopyBlocksParams params(const std::optional<torch::stable::Tensor>& src_ids,
                              const std::optional<torch::stable::Tensor>& dst_ids) const;

  bool by_slot() const { return values_[0] != 0; }
  kv::Side side(int index) const;  // 0: src, 1: dst; without ids
  int64_t run_bytes() const;

  // Bytes from the start of a plane to the end of its last block, on that side; 0 without blocks.
  int64_t reach(const kv::Side& side, int64_t kv::Axis::* stride, int64_t run_bytes) const;

  // Throws InvalidArgument for the first bad id; on the CPU only. `gather_name` names the ids of
  // src if dst has none.
  void check_ids(const kv::CopyBlocksParams& params,
                 const char* gather_name = "gather_blocks: block_ids") const;

 private:
  kv::Axis axis(int index) const;

  const int64_t* values_;
  const int64_t* planes_;
  int64_t plane_fields_;
  int64_t num_planes_;
};

}  // namespace mk::ops
