// torch.ops.mooncake_kernels.gpu_address: the address that a GPU uses for a tensor in host memory.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "common/memory_kind.h"
#include "ops/copy_planes.h"

namespace {

// The address of its first byte; 0 if part of it is in pageable memory, or it was freed.
int64_t gpu_address(torch::stable::Tensor tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const int64_t num_bytes = mk::ops::span_bytes(tensor);
  if (num_bytes == 0 || address == 0) return static_cast<int64_t>(address);
  mk::MemoryMap map;
  const auto offset = mk::device_offset_of(map, address, static_cast<uint64_t>(num_bytes));
  return offset ? static_cast<int64_t>(address + *offset) : 0;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) { m.def("gpu_address(Tensor tensor) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("gpu_address", TORCH_BOX(&gpu_address));
}
