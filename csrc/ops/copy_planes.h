// The addresses of a copy's planes: converts the plan's tensor numbers and offsets, and checks that
// the copy stays inside the tensors. Layer: ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kv/copy_blocks.h"
#include "ops/copy_plan.h"

namespace mk::ops {

using Tensors = std::vector<torch::stable::Tensor>;
using Ids = std::optional<torch::stable::Tensor>;

constexpr int64_t kMinThreadBytes = int64_t{256} << 10;  // smaller copies wake no thread

// Bytes from a tensor's first element to the end of its last.
int64_t span_bytes(const torch::stable::Tensor& tensor);

constexpr int32_t kNoGpu = -1;  // a copy by the CPU

// The tensors of one side, by the addresses that a GPU uses for them: on it, or pinned.
class Memory {
 public:
  // `gpu`: its index, or kNoGpu for tensors on the CPU; `name`: of the side, for errors.
  Memory(const char* name, const Tensors& tensors, int32_t gpu);

  // The start of a plane; `reach_bytes` is the end of its last block, 0 without blocks.
  char* base(int64_t tensor, int64_t offset, int64_t reach_bytes) const;

 private:
  std::vector<char*> bases_;
  std::vector<int64_t> spans_;
};

// Planes in tensors that are passed to each call.
class PlanesOfTensors {
 public:
  // `run_bytes`: of a run, on either side.
  PlanesOfTensors(const CopyPlan& plan, const kv::CopyBlocksParams& p, const Tensors& src,
                  const Tensors& dst, int64_t src_run_bytes, int64_t dst_run_bytes, int32_t gpu);

  kv::Plane operator()(int64_t index) const;

 private:
  const CopyPlan& plan_;
  const Memory src_, dst_;
  const int64_t src_reach_, dst_reach_;
};

// Planes of a resolved plan; tensors that are packed anew for each call start at a base.
struct ResolvedPlanes {
  const CopyPlan& plan;
  int64_t src_base;
  int64_t dst_base;

  kv::Plane operator()(int64_t index) const {
    const int64_t* plane = plan.plane(index);
    return {reinterpret_cast<const char*>(src_base + plane[0]),
            reinterpret_cast<char*>(dst_base + plane[1])};
  }
};

// The GPU that holds the ids and runs the copy; kNoGpu if the ids are on the CPU.
int32_t gpu_of(const torch::stable::Tensor& ids);

// Throws InvalidArgument if one of the lists is empty.
void check_not_empty(const Tensors& src, const Tensors& dst);

// Calls run(params, first plane) on up to kMaxPlanes planes at a time: once, for any usual model.
// `plane(i)` returns plane i.
template <class PlaneOf, class Run>
void for_each_launch(const CopyPlan& plan, kv::CopyBlocksParams& p, const PlaneOf& plane,
                     const Run& run) {
  for (int64_t first = 0; first < plan.num_planes(); first += kv::kMaxPlanes) {
    p.num_planes =
        static_cast<int32_t>(std::min<int64_t>(kv::kMaxPlanes, plan.num_planes() - first));
    for (int32_t i = 0; i < p.num_planes; ++i) p.planes[i] = plane(first + i);
    run(p, first);
  }
}

}  // namespace mk::ops
