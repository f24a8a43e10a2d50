// torch.ops.mooncake_kernels.copy_listed: lists the runs of a resolved plan on the CPU, joins
// neighbours, and passes them to the GPU's copy engines. Its ids are on the CPU, and are checked
// before anything is queued.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <vector>

#include "common/check.h"
#include "kv/copy_each.h"
#include "kv/copy_engine.h"
#include "kv/copy_list.h"
#include "kv/list_runs.h"
#include "ops/copy_plan.h"
#include "ops/copy_planes.h"
#include "ops/cuda_stream.h"

namespace {

using mk::kv::CopyBlocksParams;
using mk::kv::CopyRange;
using mk::ops::CopyPlan;
using mk::ops::Ids;
using torch::stable::Tensor;

// Numbers as in mooncake_kernels/kv/execute_listed.py. kCheck only checks the ids; kCount also
// counts the ranges; kEach copies each by its own memcpy.
enum How : int64_t { kCheck, kCount, kEach, kCopyEngine };

using Ranges = std::vector<CopyRange>;

Ranges list(const CopyPlan& plan, CopyBlocksParams& params, int64_t src_base, int64_t dst_base) {
  Ranges ranges;
  const mk::ops::ResolvedPlanes planes{plan, src_base, dst_base};
  mk::ops::for_each_launch(plan, params, planes, [&ranges](const CopyBlocksParams& p, int64_t) {
    mk::kv::list_runs(p, ranges);
  });
  return ranges;
}

#ifdef MK_WITH_CUDA
// Cuts at the ends of allocations: pinned memory may be registered in parts, which no copy may
// span.
Ranges cut(const Ranges& ranges) {
  std::vector<int64_t> src, dst, num_bytes;
  for (const CopyRange& range : ranges) {
    src.push_back(reinterpret_cast<int64_t>(range.src));
    dst.push_back(reinterpret_cast<int64_t>(range.dst));
    num_bytes.push_back(range.num_bytes);
  }
  mk::MemoryMap map;
  const auto n = static_cast<int64_t>(ranges.size());
  mk::kv::CopyList list =
      mk::kv::read_copy_list({src.data(), dst.data(), num_bytes.data()}, n, map);
  MK_CHECK(!list.pageable.exists(),
           "copy_blocks: host memory must be pinned (pin_memory()), got pageable memory at ",
           mk::kv::hex(list.pageable.address));
  return std::move(list.ranges);
}

void copy_on_gpu(const Ranges& ranges, How how, int32_t gpu) {
  const torch::stable::accelerator::DeviceGuard guard(gpu);
  void* const stream = mk::ops::current_cuda_stream(gpu);
  const Ranges parts = cut(ranges);
  const auto n = static_cast<int64_t>(parts.size());
  if (how == kCopyEngine) {
    mk::kv::copy_by_engine(parts.data(), n, false, stream);
  } else {
    mk::kv::launch_copy_each(parts.data(), n, stream);
  }
}
#else
void copy_on_gpu(const Ranges&, How, int32_t) {
  throw mk::Unavailable("engine copy_engine: _ops.so was built without nvcc");
}
#endif

// For the GPU of that index; kNoGpu is for tests, of kEach only. Returns the number of ranges.
int64_t copy_listed(Tensor plan_tensor, int64_t src_base, int64_t dst_base, Ids src_ids,
                    Ids dst_ids, int64_t how, int64_t gpu) {
  for (const Ids& ids : {src_ids, dst_ids}) {
    MK_CHECK(!ids || ids->is_cpu(), "copy_listed: block ids must be on the CPU");
  }
  MK_CHECK(kCheck <= how && how <= kCopyEngine, "copy_listed: how must be in [0, 3], got ", how);
  const CopyPlan plan(plan_tensor, CopyPlan::kResolvedFields);
  CopyBlocksParams params = plan.params(src_ids, dst_ids);
  plan.check_ids(params);
  if (how == kCheck) return 0;
  const Ranges ranges = list(plan, params, src_base, dst_base);
  const auto num_ranges = static_cast<int64_t>(ranges.size());
  if (how == kCount || num_ranges == 0) return num_ranges;
  if (gpu != mk::ops::kNoGpu) {
    copy_on_gpu(ranges, static_cast<How>(how), static_cast<int32_t>(gpu));
    return num_ranges;
  }
  MK_CHECK(how == kEach, "copy_listed: gpu must be one for the copy engines, got none");
  for (const CopyRange& range : ranges) std::memcpy(range.dst, range.src, range.num_bytes);
  return num_ranges;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "copy_listed(Tensor plan, int src_base, int dst_base, Tensor? src_blocks, "
      "Tensor? dst_blocks, int how, int gpu) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("copy_listed", TORCH_BOX(&copy_listed));
}
