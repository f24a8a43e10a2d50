// torch's current CUDA stream, for a library that is built without a CUDA-enabled torch.
//
// Layer: ops.
#pragma once

#include <cstdint>

namespace mk::ops {

// The cudaStream_t of torch's current stream on that device. Throws Unavailable if this torch was
// built without CUDA.
void* current_cuda_stream(int32_t device_index);

}  // namespace mk::ops
