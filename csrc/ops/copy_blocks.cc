// torch.ops.mooncake_kernels.copy_blocks, and the pair resolve_copy_plan and copy_resolved: the
// torch binding of csrc/kv/copy_blocks.h. copy_plan.h describes the tensor `plan`.
//
// copy_blocks receives the tensors at each call and declares what it mutates: it is the operator
// for compiled code. Passing 160 tensors costs 40 us, so elsewhere resolve_copy_plan stores their
// addresses in the plan once, and copy_resolved receives only that and the ids.
//
// `bad_id` is the address of the BadId that the CUDA kernel reports to, 0 for none. It is not a
// tensor: torch.compile may pass an operator a copy of what it mutates, and a copy is not pinned.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "common/math.h"
#include "kv/copy_blocks.h"
#include "kv/copy_bulk.h"
#include "ops/copy_plan.h"
#include "ops/copy_planes.h"
#include "ops/cuda_stream.h"

namespace {

using mk::kv::Axis;
using mk::kv::BadId;
using mk::kv::CopyBlocksParams;
using mk::ops::check_not_empty;
using mk::ops::CopyPlan;
using mk::ops::for_each_launch;
using mk::ops::gpu_of;
using mk::ops::Ids;
using mk::ops::kMinThreadBytes;
using mk::ops::kNoGpu;
using mk::ops::Memory;
using mk::ops::PlanesOfTensors;
using mk::ops::ResolvedPlanes;
using mk::ops::Tensors;
using torch::stable::Tensor;

template <class PlaneOf>
void copy_on_cpu(const CopyPlan& plan, CopyBlocksParams& params, const PlaneOf& plane) {
  plan.check_ids(params);  // all of them before a byte moves
  for_each_launch(plan, params, plane, [](const CopyBlocksParams& p, int64_t) {
    if (p.num_runs() == 0) return;
    const int64_t bytes = std::max<int64_t>(p.runs_per_plane() * p.run_bytes, 1);
    torch::stable::parallel_for(
        0, p.num_pieces * p.num_planes, mk::ceil_div(kMinThreadBytes, bytes),
        [&p](int64_t begin, int64_t end) { mk::kv::copy_blocks_host(p, begin, end); });
  });
}

void copy_blocks_cpu(Tensors src, Tensors dst, Tensor plan_tensor, Ids src_ids, Ids dst_ids,
                     int64_t /*bad_id*/, int64_t /*max_sms*/) {
  check_not_empty(src, dst);
  const CopyPlan plan(plan_tensor, CopyPlan::kPlaneFields);
  CopyBlocksParams params = plan.params(src_ids, dst_ids);
  copy_on_cpu(plan, params,
              PlanesOfTensors(plan, params, src, dst, params.run_bytes, params.run_bytes, kNoGpu));
}

void copy_resolved_cpu(Tensor plan_tensor, int64_t src_base, int64_t dst_base, Ids src_ids,
                       Ids dst_ids, int64_t /*bad_id*/, int64_t /*max_sms*/, bool bulk) {
  MK_CHECK(!bulk, "copy_resolved: bulk must be false for ids on the CPU, got true");
  const CopyPlan plan(plan_tensor, CopyPlan::kResolvedFields);
  CopyBlocksParams params = plan.params(src_ids, dst_ids);
  copy_on_cpu(plan, params, ResolvedPlanes{plan, src_base, dst_base});
}

// For the GPU of that index, or kNoGpu. A side without tensors is packed: its offsets are kept, to
// be added to a base.
void resolve_copy_plan(Tensors src, Tensors dst, Tensor plan_tensor, Tensor resolved,
                       int64_t dst_run_bytes, int64_t gpu) {
  const CopyPlan plan(plan_tensor, CopyPlan::kPlaneFields);
  const CopyPlan out(resolved, CopyPlan::kResolvedFields);
  MK_CHECK(out.num_planes() == plan.num_planes(),
           "resolve_copy_plan: resolved must have room for the plan's planes");
  const Memory src_memory("src", src, static_cast<int32_t>(gpu));
  const Memory dst_memory("dst", dst, static_cast<int32_t>(gpu));
  const int64_t src_reach = plan.reach(plan.side(0), &Axis::src_stride, plan.run_bytes());
  const int64_t dst_reach = plan.reach(plan.side(1), &Axis::dst_stride, dst_run_bytes);
  auto* const values = static_cast<int64_t*>(resolved.mutable_data_ptr());
  const int64_t header = resolved.numel() - CopyPlan::kResolvedFields * plan.num_planes();
  std::copy_n(static_cast<const int64_t*>(plan_tensor.data_ptr()), header, values);
  for (int64_t i = 0; i < plan.num_planes(); ++i) {
    const int64_t* plane = plan.plane(i);
    int64_t* const to = values + header + CopyPlan::kResolvedFields * i;
    to[0] = src.empty() ? plane[1]
                        : reinterpret_cast<int64_t>(src_memory.base(plane[0], plane[1], src_reach));
    to[1] = dst.empty() ? plane[3]
                        : reinterpret_cast<int64_t>(dst_memory.base(plane[2], plane[3], dst_reach));
  }
}

#ifdef MK_WITH_CUDA
template <class PlaneOf>
void copy_on_cuda(const CopyPlan& plan, CopyBlocksParams& params, const PlaneOf& plane,
                  int32_t device, int64_t bad_id, int64_t max_sms, bool bulk = false) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = mk::ops::current_cuda_stream(device);
  const auto launch = bulk ? mk::kv::launch_copy_bulk : mk::kv::launch_copy_blocks;
  for_each_launch(plan, params, plane, [&](const CopyBlocksParams& p, int64_t) {
    launch(p, reinterpret_cast<BadId*>(bad_id), static_cast<int>(max_sms), stream);
  });
}

// The device that the ids are on.
int32_t check_device(const Ids& src_ids, const Ids& dst_ids) {
  for (const Ids& ids : {src_ids, dst_ids}) {
    MK_CHECK(!ids || ids->is_cuda(), "copy_blocks: block ids must be on the device of the cache");
  }
  return gpu_of(src_ids ? *src_ids : *dst_ids);
}

void copy_blocks_cuda(Tensors src, Tensors dst, Tensor plan_tensor, Ids src_ids, Ids dst_ids,
                      int64_t bad_id, int64_t max_sms) {
  check_not_empty(src, dst);
  const CopyPlan plan(plan_tensor, CopyPlan::kPlaneFields);
  CopyBlocksParams params = plan.params(src_ids, dst_ids);
  const int32_t gpu = check_device(src_ids, dst_ids);
  copy_on_cuda(plan, params,
               PlanesOfTensors(plan, params, src, dst, params.run_bytes, params.run_bytes, gpu),
               gpu, bad_id, max_sms);
}

void copy_resolved_cuda(Tensor plan_tensor, int64_t src_base, int64_t dst_base, Ids src_ids,
                        Ids dst_ids, int64_t bad_id, int64_t max_sms, bool bulk) {
  const CopyPlan plan(plan_tensor, CopyPlan::kResolvedFields);
  CopyBlocksParams params = plan.params(src_ids, dst_ids);
  const int32_t device = check_device(src_ids, dst_ids);
  copy_on_cuda(plan, params, ResolvedPlanes{plan, src_base, dst_base}, device, bad_id, max_sms,
               bulk);
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "copy_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor plan, Tensor? src_blocks, "
      "Tensor? dst_blocks, int bad_id, int max_sms) -> ()");
  m.def(
      "resolve_copy_plan(Tensor[] src, Tensor[] dst, Tensor plan, Tensor(a!) resolved, "
      "int dst_run_bytes, int gpu) -> ()");
  m.def(
      "copy_resolved(Tensor plan, int src_base, int dst_base, Tensor? src_blocks, "
      "Tensor? dst_blocks, int bad_id, int max_sms, bool bulk=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CompositeExplicitAutograd, m) {
  m.impl("resolve_copy_plan", TORCH_BOX(&resolve_copy_plan));
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks_cpu));
  m.impl("copy_resolved", TORCH_BOX(&copy_resolved_cpu));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks_cuda));
  m.impl("copy_resolved", TORCH_BOX(&copy_resolved_cuda));
}
#endif
