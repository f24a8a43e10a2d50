#include "ops/copy_planes.h"

#include <string>

#include "common/check.h"
#include "common/memory_kind.h"

namespace mk::ops {
namespace {

using kv::Axis;
using torch::stable::Tensor;

// The address that a GPU uses for host memory. Empty or freed memory has none.
char* as_gpu_address(char* base, int64_t span, const char* name, size_t index, MemoryMap& map) {
  if (span == 0) return base;
  const auto offset =
      device_offset_of(map, reinterpret_cast<uintptr_t>(base), static_cast<uint64_t>(span));
  MK_CHECK(offset, "copy_blocks: ", name,
           " must be on the GPU or in pinned host memory (pin_memory()), got tensor ", index,
           " in pageable memory");
  return base + *offset;
}

}  // namespace

int64_t span_bytes(const Tensor& tensor) {
  int64_t last = 0;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

Memory::Memory(const char* name, const Tensors& tensors, int32_t gpu) {
  std::optional<MemoryMap> map;  // queried only for host memory that a GPU is to reach
  for (const Tensor& tensor : tensors) {
    const size_t index = bases_.size();
    MK_CHECK(tensor.is_cpu() || tensor.get_device_index() == gpu, "copy_blocks: ", name,
             " must be on one device with the ids, got tensor ", index,
             " on cuda:", tensor.get_device_index());
    bases_.push_back(static_cast<char*>(tensor.data_ptr()));
    spans_.push_back(bases_.back() ? span_bytes(tensor) : 0);  // null: its storage was freed
    if (gpu == kNoGpu || !tensor.is_cpu()) continue;
    if (!map) map.emplace();
    bases_.back() = as_gpu_address(bases_.back(), spans_.back(), name, index, *map);
  }
}

char* Memory::base(int64_t tensor, int64_t offset, int64_t reach_bytes) const {
  const bool inside = 0 <= tensor && tensor < static_cast<int64_t>(bases_.size()) && 0 <= offset &&
                      (reach_bytes == 0 || offset + reach_bytes <= spans_[tensor]);
  MK_CHECK(inside,
           "copy_blocks: plan must lie inside its tensors: it was made for others, or their "
           "memory was freed");
  return bases_[tensor] + offset;
}

PlanesOfTensors::PlanesOfTensors(const CopyPlan& plan, const kv::CopyBlocksParams& p,
                                 const Tensors& src, const Tensors& dst, int64_t src_run_bytes,
                                 int64_t dst_run_bytes, int32_t gpu)
    : plan_(plan),
      src_("src", src, gpu),
      dst_("dst", dst, gpu),
      src_reach_(plan.reach(p.src, &Axis::src_stride, src_run_bytes)),
      dst_reach_(plan.reach(p.dst, &Axis::dst_stride, dst_run_bytes)) {}

kv::Plane PlanesOfTensors::operator()(int64_t index) const {
  const int64_t* plane = plan_.plane(index);
  return {src_.base(plane[0], plane[1], src_reach_), dst_.base(plane[2], plane[3], dst_reach_)};
}

int32_t gpu_of(const Tensor& ids) { return ids.is_cpu() ? kNoGpu : ids.get_device_index(); }

void check_not_empty(const Tensors& src, const Tensors& dst) {
  MK_CHECK(!src.empty() && !dst.empty(), "copy_blocks: src and dst must not be empty lists");
}

}  // namespace mk::ops
