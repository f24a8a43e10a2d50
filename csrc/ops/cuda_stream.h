// torch's current CUDA stream, for a library that is built without a CUDA-enabled torch.
//
// Layer: ops.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace mk::ops {

// The cudaStream_t of torch's current stream on that device. Throws Unavailable if this torch was
// built without CUDA.
void* current_cuda_stream(int32_t device_index);

// Calls `launch` with torch's current stream on the tensor's device.
template <class Launch>
void on_cuda(const torch::stable::Tensor& where, const Launch& launch) {
  const int32_t device = where.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  launch(current_cuda_stream(device));
}

}  // namespace mk::ops
