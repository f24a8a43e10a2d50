#include "ops/copy_planes.h"

#include "common/check.h"

namespace mk::ops {
namespace {

using kv::Axis;
using torch::stable::Tensor;

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

}  // namespace

Memory::Memory(const Tensors& tensors, const Tensor& first) {
  for (const Tensor& tensor : tensors) {
    MK_CHECK(
        tensor.is_cpu() == first.is_cpu() && tensor.get_device_index() == first.get_device_index(),
        "copy_blocks: src and dst must be on one device");
    bases_.push_back(static_cast<char*>(tensor.data_ptr()));
    spans_.push_back(bases_.back() ? span_bytes(tensor) : 0);  // null: its storage was freed
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
                                 int64_t dst_run_bytes)
    : plan_(plan),
      src_(src, src.at(0)),
      dst_(dst, src.at(0)),
      src_reach_(plan.reach(p.src, &Axis::src_stride, src_run_bytes)),
      dst_reach_(plan.reach(p.dst, &Axis::dst_stride, dst_run_bytes)) {}

kv::Plane PlanesOfTensors::operator()(int64_t index) const {
  const int64_t* plane = plan_.plane(index);
  return {src_.base(plane[0], plane[1], src_reach_), dst_.base(plane[2], plane[3], dst_reach_)};
}

void check_not_empty(const Tensors& src, const Tensors& dst) {
  MK_CHECK(!src.empty() && !dst.empty(), "copy_blocks: src and dst must not be empty lists");
}

}  // namespace mk::ops
