// torch.ops.mooncake_kernels.copy_blocks: the torch binding of csrc/kv/copy_blocks.h.
//
// `plan` is int64 on the CPU (mooncake_kernels/_layout.py makes it once; it holds no addresses):
//   whether ids are slots,
//   for src and dst (num_ids, block_stride, pieces_per_id, piece_stride, slots_per_block,
//   slot_stride), run_bytes, kMaxAxes x (extent, src_stride, dst_stride),
//   and for each plane (src tensor, src offset, dst tensor, dst offset), offsets in bytes.
//
// `bad_id` is the address of the BadId that the CUDA kernel reports to, 0 for none. It is no
// tensor: torch.compile may hand an operator a copy of what it mutates, and a copy is not pinned.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/math.h"
#include "kv/copy_blocks.h"
#include "ops/cuda_stream.h"

namespace {

using mk::kv::Axis;
using mk::kv::BadId;
using mk::kv::CopyBlocksParams;
using mk::kv::kMaxAxes;
using mk::kv::kMaxPlanes;
using mk::kv::Side;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kSideFields = 6;
constexpr int64_t kHeader = 2 + 2 * kSideFields + 3 * kMaxAxes;
constexpr int64_t kPlaneFields = 4;

// The plan's numbers, with names.
struct Plan {
  const int64_t* values;
  int64_t num_planes;

  explicit Plan(const Tensor& plan) : values(static_cast<const int64_t*>(plan.data_ptr())) {
    const bool good = plan.scalar_type() == ScalarType::Long && plan.is_cpu() && plan.dim() == 1 &&
                      plan.is_contiguous() && plan.numel() >= kHeader &&
                      (plan.numel() - kHeader) % kPlaneFields == 0;
    MK_CHECK(good, "copy_blocks: plan must be an int64 CPU tensor that CopyPlan made");
    num_planes = (plan.numel() - kHeader) / kPlaneFields;
  }
  bool by_slot() const { return values[0] != 0; }
  Side side(int index) const {
    const int64_t* v = values + 1 + kSideFields * index;
    MK_CHECK(v[2] > 0 && v[4] > 0, "copy_blocks: plan must be one that CopyPlan made");
    return {nullptr, false, v[0], v[1], v[2], v[3], v[4], v[5]};
  }
  int64_t run_bytes() const { return values[1 + 2 * kSideFields]; }
  Axis axis(int index) const {
    const int64_t* v = values + 2 + 2 * kSideFields + 3 * index;
    return {v[0], v[1], v[2]};
  }
  const int64_t* plane(int64_t index) const { return values + kHeader + kPlaneFields * index; }
};

// Gives a side its ids; returns how many pieces they name.
int64_t set_ids(Side& side, const std::optional<Tensor>& ids, const char* name) {
  if (!ids) return std::numeric_limits<int64_t>::max();
  side.is_64_bit = ids->scalar_type() == ScalarType::Long;
  MK_CHECK(ids->dim() == 1 && ids->is_contiguous() &&
               (side.is_64_bit || ids->scalar_type() == ScalarType::Int),
           "copy_blocks: ", name, " must be a packed 1-d int32 or int64 tensor");
  side.ids = ids->data_ptr();
  return ids->numel() * side.pieces_per_id;
}

// All the pieces must take every id of a side.
void check_count(const Side& side, int64_t num_pieces, const std::optional<Tensor>& ids,
                 const char* name) {
  const int64_t num_ids = mk::ceil_div(num_pieces, side.pieces_per_id);
  MK_CHECK(!ids || ids->numel() == num_ids, "copy_blocks: ", name, " must have ", num_ids,
           " ids, got ", ids->numel());
}

// Bytes from a tensor's first element to the end of its last.
int64_t span_bytes(const Tensor& tensor) {
  int64_t last = 0;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

// The tensors of one side: base addresses, checked to stay inside.
struct Memory {
  std::vector<char*> bases;
  std::vector<int64_t> spans;

  Memory(const Tensors& tensors, const Tensor& first) {
    for (const Tensor& tensor : tensors) {
      MK_CHECK(tensor.is_cpu() == first.is_cpu() &&
                   tensor.get_device_index() == first.get_device_index(),
               "copy_blocks: src and dst must be on one device");
      bases.push_back(static_cast<char*>(tensor.data_ptr()));
      spans.push_back(bases.back() ? span_bytes(tensor) : 0);  // null: its storage was freed
    }
  }
  // Where `plane` of this side starts; `reach_bytes` is what a plane's last block ends at, 0 if
  // it has no blocks.
  char* base(int64_t tensor, int64_t offset, int64_t reach_bytes) const {
    const bool inside = 0 <= tensor && tensor < static_cast<int64_t>(bases.size()) && 0 <= offset &&
                        (reach_bytes == 0 || offset + reach_bytes <= spans[tensor]);
    MK_CHECK(inside,
             "copy_blocks: plan must lie inside its tensors: it was made for others, or their "
             "memory was freed");
    return bases[tensor] + offset;
  }
};

int64_t reach_bytes(const CopyBlocksParams& p, const Side& side, int64_t Axis::* stride) {
  const int64_t num_blocks = side.num_ids / side.slots_per_block;
  int64_t reach = (num_blocks - 1) * side.block_stride + p.run_bytes;
  reach += (side.pieces_per_id - 1) * side.piece_stride;
  reach += (side.slots_per_block - 1) * side.slot_stride;
  for (const Axis& axis : p.axes) reach += (axis.extent - 1) * axis.*stride;
  return num_blocks == 0 ? 0 : reach;
}

CopyBlocksParams unpack(const Plan& plan, const std::optional<Tensor>& src_blocks,
                        const std::optional<Tensor>& dst_blocks) {
  MK_CHECK(src_blocks || dst_blocks, "copy_blocks: src_blocks or dst_blocks must be given");
  CopyBlocksParams p{};
  p.src = plan.side(0);
  p.dst = plan.side(1);
  p.num_pieces =
      std::min(set_ids(p.src, src_blocks, "src_blocks"), set_ids(p.dst, dst_blocks, "dst_blocks"));
  check_count(p.src, p.num_pieces, src_blocks, "src_blocks");
  check_count(p.dst, p.num_pieces, dst_blocks, "dst_blocks");
  if (!src_blocks) p.src.num_ids = mk::ceil_div(p.num_pieces, p.src.pieces_per_id);
  if (!dst_blocks) p.dst.num_ids = mk::ceil_div(p.num_pieces, p.dst.pieces_per_id);
  p.run_bytes = plan.run_bytes();
  for (int i = 0; i < kMaxAxes; ++i) p.axes[i] = plan.axis(i);
  return p;
}

// Calls `run` with the parameters of up to kMaxPlanes planes at a time: once, for any usual model.
template <class Run>
void for_each_launch(const Tensors& src, const Tensors& dst, const Plan& plan, CopyBlocksParams& p,
                     const Run& run) {
  MK_CHECK(!src.empty() && !dst.empty(), "copy_blocks: src and dst must not be empty lists");
  const Memory src_memory(src, src[0]), dst_memory(dst, src[0]);
  const int64_t src_reach = reach_bytes(p, p.src, &Axis::src_stride);
  const int64_t dst_reach = reach_bytes(p, p.dst, &Axis::dst_stride);
  for (int64_t first = 0; first < plan.num_planes; first += kMaxPlanes) {
    p.num_planes = static_cast<int32_t>(std::min<int64_t>(kMaxPlanes, plan.num_planes - first));
    for (int32_t i = 0; i < p.num_planes; ++i) {
      const int64_t* plane = plan.plane(first + i);
      p.planes[i] = {src_memory.base(plane[0], plane[1], src_reach),
                     dst_memory.base(plane[2], plane[3], dst_reach)};
    }
    run(p);
  }
}

void check_ids(const CopyBlocksParams& p, bool by_slot, bool has_src, bool has_dst) {
  for (int64_t piece = 0; piece < p.num_pieces; ++piece) {
    const BadId bad = p.check(piece);
    if (bad.side == 0) continue;
    const bool is_src = bad.side == 1;
    const char* name = !has_dst   ? "gather_blocks: block_ids"
                       : !has_src ? "scatter_blocks: block_ids"
                       : by_slot  ? (is_src ? "copy_slots: src_slots" : "copy_slots: dst_slots")
                       : is_src   ? "copy_blocks: src_blocks"
                                  : "copy_blocks: dst_blocks";
    throw mk::InvalidArgument(mk::concat(name, "[", bad.index, "] must be -1 or in [0, ",
                                         (is_src ? p.src : p.dst).num_ids, "), got ", bad.id));
  }
}

void copy_blocks_cpu(Tensors src, Tensors dst, Tensor plan_tensor, std::optional<Tensor> src_blocks,
                     std::optional<Tensor> dst_blocks, int64_t /*bad_id*/, int64_t /*max_sms*/) {
  const Plan plan(plan_tensor);
  CopyBlocksParams params = unpack(plan, src_blocks, dst_blocks);
  // All, before a byte moves.
  check_ids(params, plan.by_slot(), src_blocks.has_value(), dst_blocks.has_value());
  for_each_launch(src, dst, plan, params, [](const CopyBlocksParams& p) {
    if (p.num_runs() == 0) return;
    const int64_t piece_bytes = p.num_planes * p.runs_per_plane() * p.run_bytes;
    const int64_t grain = mk::ceil_div(int64_t{256} << 10, std::max<int64_t>(piece_bytes, 1));
    torch::stable::parallel_for(0, p.num_pieces, grain, [&p](int64_t begin, int64_t end) {
      mk::kv::copy_blocks_host(p, begin, end);
    });
  });
}

#ifdef MK_WITH_CUDA
void copy_blocks_cuda(Tensors src, Tensors dst, Tensor plan_tensor,
                      std::optional<Tensor> src_blocks, std::optional<Tensor> dst_blocks,
                      int64_t bad_id, int64_t max_sms) {
  const Plan plan(plan_tensor);
  CopyBlocksParams params = unpack(plan, src_blocks, dst_blocks);
  for (const auto& ids : {src_blocks, dst_blocks}) {
    MK_CHECK(!ids || ids->is_cuda(), "copy_blocks: block ids must be on the device of the cache");
  }
  const int32_t device = src.at(0).get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = mk::ops::current_cuda_stream(device);
  for_each_launch(src, dst, plan, params, [&](const CopyBlocksParams& p) {
    mk::kv::launch_copy_blocks(p, reinterpret_cast<BadId*>(bad_id), static_cast<int>(max_sms),
                               stream);
  });
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "copy_blocks(Tensor[] src, Tensor(a!)[] dst, Tensor plan, Tensor? src_blocks, "
      "Tensor? dst_blocks, int bad_id, int max_sms) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks_cpu));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks_cuda));
}
#endif
