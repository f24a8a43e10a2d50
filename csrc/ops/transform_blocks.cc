// torch.ops.mooncake_kernels.transform_blocks and checksum_blocks: the torch binding of
// csrc/kv/transform_blocks.h. As in copy_blocks.cc, those for compiled code receive the tensors;
// the other two, transform_resolved and checksum_resolved, receive a plan that contains the
// addresses.
//
// `plan` is that of copy_plan.h, with rows as runs and (head, token) as axes. `transform` is an
// int64 CPU tensor of length kTransformFields, made by mooncake_kernels/kv/row_plan.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "common/check.h"
#include "common/math.h"
#include "kv/transform_blocks.h"
#include "ops/copy_plan.h"
#include "ops/copy_planes.h"
#include "ops/cuda_stream.h"
#include "ops/packed.h"

namespace {

using mk::ElementType;
using mk::kv::BadId;
using mk::kv::CopyBlocksParams;
using mk::kv::Plane;
using mk::kv::TransformBlocksParams;
using mk::ops::CopyPlan;
using mk::ops::Ids;
using mk::ops::PlanesOfTensors;
using mk::ops::ResolvedPlanes;
using mk::ops::Tensors;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTransformFields = 9;

// Null if absent.
template <class T>
T* data_of(const std::optional<Tensor>& tensor, ScalarType type, int64_t count, const Tensor& ids,
           const char* name) {
  return mk::ops::packed<T>("transform_blocks", name, tensor, type, count, ids);
}

// Everything but the planes.
TransformBlocksParams params_of(const CopyPlan& plan, const Tensor& transform, const Ids& src_ids,
                                const Ids& dst_ids) {
  MK_CHECK(transform.scalar_type() == ScalarType::Long && transform.is_cpu() &&
               transform.is_contiguous() && transform.numel() == kTransformFields,
           "transform_blocks: transform must be an int64 CPU tensor that CopyPlan made");
  const auto* v = static_cast<const int64_t*>(transform.data_ptr());
  TransformBlocksParams p{};
  p.copy = plan.params(src_ids, dst_ids);
  p.dim = v[0];
  p.src_type = static_cast<ElementType>(v[1]);
  p.dst_type = static_cast<ElementType>(v[2]);
  p.src_row_bytes = plan.run_bytes();
  p.dst_row_bytes = v[3];
  p.keys_alternate = v[4] != 0;
  p.rotation = {nullptr, v[5], v[6], v[7] != 0};
  p.first_word = static_cast<uint64_t>(v[8]);
  const auto is_fp8 = [](ElementType type) {
    return type == ElementType::kFloat8E4M3 || type == ElementType::kFloat8E5M2;
  };
  const bool converts = p.src_type != ElementType::kBytes && p.dst_type != ElementType::kBytes &&
                        is_fp8(p.src_type) != is_fp8(p.dst_type);
  MK_CHECK(v[1] >= 0 && v[1] <= 5 && v[2] >= 0 && v[2] <= 5 && (v[1] == v[2] || converts),
           "transform_blocks: transform must convert between fp8 and a float, got types ", v[1],
           " and ", v[2]);
  const bool inside = p.rotation.first >= 0 && p.rotation.num_pairs >= 0 &&
                      p.rotation.first + 2 * p.rotation.num_pairs <= p.dim;
  MK_CHECK(inside, "transform_blocks: transform must turn elements inside a row");
  return p;
}

template <class PlaneOf, class Run>
void for_each_launch(const CopyPlan& plan, TransformBlocksParams& params, const PlaneOf& plane,
                     const Run& run) {
  mk::ops::for_each_launch(plan, params.copy, plane, [&](const CopyBlocksParams&, int64_t first) {
    params.first_plane = first;
    run(params);
  });
}

void run_on_cpu(const TransformBlocksParams& p) {
  if (p.copy.num_runs() == 0 || p.dim == 0) return;
  const int64_t bytes = std::max<int64_t>(p.num_rows() * p.src_row_bytes, 1);
  torch::stable::parallel_for(
      0, p.copy.num_pieces * p.copy.num_planes, mk::ceil_div(mk::ops::kMinThreadBytes, bytes),
      [&p](int64_t begin, int64_t end) { mk::kv::transform_blocks_host(p, begin, end); });
}

void check_sums(const TransformBlocksParams& p, bool by_slot) {
  for (int64_t piece = 0; p.expected && piece < p.copy.num_pieces; ++piece) {
    const int64_t i = p.copy.src.index(piece), id = p.copy.src.id(piece);
    if (id == mk::kv::kHole || p.copy.dst.id(piece) == mk::kv::kHole) continue;
    MK_CHECK(p.is_as_expected(piece),
             by_slot ? "CopyPlan.run_slots: src_slots[" : "CopyPlan.run: src_blocks[", i,
             by_slot ? "]: slot " : "]: block ", id, " must have checksum ", p.expected[i],
             ", got ", p.actual[i]);
  }
}

// What a call may add to the plan.
struct Extras {
  const Ids& scales;
  const Ids& cos_sin;
  const Ids& expected;
  const Ids& actual;
  const Ids& sums;
};

void set_extras(TransformBlocksParams& p, const CopyPlan& plan, const Extras& extras,
                const Tensor& ids) {
  const auto count = [&](const mk::kv::Side& side) {
    return mk::ceil_div(p.copy.num_pieces, side.pieces_per_id);
  };
  const int64_t num_src = count(p.copy.src), num_dst = count(p.copy.dst);
  const int64_t num_scales = plan.num_planes() * p.num_heads();
  const int64_t num_angles = p.copy.num_pieces * 2 * p.rotation.num_pairs;
  constexpr ScalarType kFloat = ScalarType::Float, kLong = ScalarType::Long;
  p.scales = data_of<const float>(extras.scales, kFloat, num_scales, ids, "scales");
  p.rotation.cos_sin = data_of<const float>(extras.cos_sin, kFloat, num_angles, ids, "cos_sin");
  p.expected = data_of<const int64_t>(extras.expected, kLong, num_src, ids, "expected");
  p.actual = data_of<const int64_t>(extras.actual, kLong, num_src, ids, "actual");
  p.sums = data_of<int64_t>(extras.sums, kLong, num_dst, ids, "sums");
  MK_CHECK(!p.expected || p.actual, "transform_blocks: actual must be given with expected");
}

// Runs where the ids are; `name` names the ids of src if dst has none.
template <class PlaneOf>
void run(const CopyPlan& plan, TransformBlocksParams& p, const PlaneOf& planes, const Tensor& ids,
         const char* name, int64_t bad_id, int64_t max_sms) {
  const int32_t gpu = mk::ops::gpu_of(ids);
  if (gpu == mk::ops::kNoGpu) {
    plan.check_ids(p.copy, name);  // all of them before a byte moves
    check_sums(p, plan.by_slot());
    return for_each_launch(plan, p, planes, run_on_cpu);
  }
#ifdef MK_WITH_CUDA
  const torch::stable::accelerator::DeviceGuard guard(gpu);
  void* const stream = mk::ops::current_cuda_stream(gpu);
  for_each_launch(plan, p, planes, [&](const TransformBlocksParams& params) {
    mk::kv::launch_transform_blocks(params, reinterpret_cast<BadId*>(bad_id),
                                    static_cast<int>(max_sms), stream);
  });
#endif
}

void transform_blocks(Tensors src, Tensors dst, Tensor plan_tensor, Tensor transform, Ids src_ids,
                      Ids dst_ids, Ids scales, Ids cos_sin, Ids expected, Ids actual, Ids sums,
                      int64_t bad_id, int64_t max_sms) {
  mk::ops::check_not_empty(src, dst);
  const CopyPlan plan(plan_tensor, CopyPlan::kPlaneFields);
  TransformBlocksParams p = params_of(plan, transform, src_ids, dst_ids);
  const Tensor& ids = src_ids ? *src_ids : *dst_ids;
  set_extras(p, plan, {scales, cos_sin, expected, actual, sums}, ids);
  const PlanesOfTensors planes(plan, p.copy, src, dst, p.src_row_bytes, p.dst_row_bytes,
                               mk::ops::gpu_of(ids));
  run(plan, p, planes, ids, "transform_blocks: block_ids", bad_id, max_sms);
}

void transform_resolved(Tensor plan_tensor, Tensor transform, Ids src_ids, Ids dst_ids, Ids scales,
                        Ids cos_sin, Ids expected, Ids actual, Ids sums, int64_t bad_id,
                        int64_t max_sms) {
  const CopyPlan plan(plan_tensor, CopyPlan::kResolvedFields);
  TransformBlocksParams p = params_of(plan, transform, src_ids, dst_ids);
  const Tensor& ids = src_ids ? *src_ids : *dst_ids;
  set_extras(p, plan, {scales, cos_sin, expected, actual, sums}, ids);
  run(plan, p, ResolvedPlanes{plan, 0, 0}, ids, "transform_blocks: block_ids", bad_id, max_sms);
}

// Planes that are only read: those of src, with no dst.
template <class PlaneOf>
void add_up(const CopyPlan& plan, TransformBlocksParams& p, const PlaneOf& planes,
            const Tensor& ids, const Tensor& sums, int64_t bad_id, int64_t max_sms) {
  p.sums = data_of<int64_t>(sums, ScalarType::Long, ids.numel(), ids, "sums");
  p.copy.dst = {nullptr, false, p.copy.num_pieces, 0, 1, 0, 1, 0};
  for (mk::kv::Axis& axis : p.copy.axes) axis.dst_stride = 0;
  const auto plane = [&planes](int64_t i) { return Plane{planes(i).src, nullptr}; };
  run(plan, p, plane, ids, "checksum_blocks: block_ids", bad_id, max_sms);
}

void checksum_blocks(Tensors src, Tensor plan_tensor, Tensor transform, Tensor ids, Tensor sums,
                     int64_t bad_id, int64_t max_sms) {
  mk::ops::check_not_empty(src, src);
  const CopyPlan plan(plan_tensor, CopyPlan::kPlaneFields);
  TransformBlocksParams p = params_of(plan, transform, ids, std::nullopt);
  p.copy.dst.num_ids = p.copy.src.num_ids;  // src stands for it: ids may repeat
  const PlanesOfTensors planes(plan, p.copy, src, src, p.src_row_bytes, p.src_row_bytes,
                               mk::ops::gpu_of(ids));
  add_up(plan, p, planes, ids, sums, bad_id, max_sms);
}

void checksum_resolved(Tensor plan_tensor, Tensor transform, Tensor ids, Tensor sums,
                       int64_t bad_id, int64_t max_sms) {
  const CopyPlan plan(plan_tensor, CopyPlan::kResolvedFields);
  TransformBlocksParams p = params_of(plan, transform, ids, std::nullopt);
  add_up(plan, p, ResolvedPlanes{plan, 0, 0}, ids, sums, bad_id, max_sms);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "transform_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor plan, Tensor transform, "
      "Tensor? src_blocks, Tensor? dst_blocks, Tensor? scales, Tensor? cos_sin, Tensor? expected, "
      "Tensor? actual, Tensor(b!)? sums, int bad_id, int max_sms) -> ()");
  m.def(
      "transform_resolved(Tensor plan, Tensor transform, Tensor? src_blocks, Tensor? dst_blocks, "
      "Tensor? scales, Tensor? cos_sin, Tensor? expected, Tensor? actual, Tensor(a!)? sums, "
      "int bad_id, int max_sms) -> ()");
  m.def(
      "checksum_resolved(Tensor plan, Tensor transform, Tensor block_ids, Tensor(a!) sums, "
      "int bad_id, int max_sms) -> ()");
  m.def(
      "checksum_blocks(Tensor[] src, Tensor plan, Tensor transform, Tensor block_ids, "
      "Tensor(a!) sums, int bad_id, int max_sms) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("transform_blocks", TORCH_BOX(&transform_blocks));
  m.impl("checksum_blocks", TORCH_BOX(&checksum_blocks));
  m.impl("transform_resolved", TORCH_BOX(&transform_resolved));
  m.impl("checksum_resolved", TORCH_BOX(&checksum_resolved));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("transform_blocks", TORCH_BOX(&transform_blocks));
  m.impl("checksum_blocks", TORCH_BOX(&checksum_blocks));
  m.impl("transform_resolved", TORCH_BOX(&transform_resolved));
  m.impl("checksum_resolved", TORCH_BOX(&checksum_resolved));
}
#endif
