// The device code of packed_mask: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "mask/packed_mask.h"

namespace mk::mask {

constexpr int kPackThreads = 256;

// One thread per word; neighbours handle neighbouring words.
template <class Source>
__global__ void __launch_bounds__(kPackThreads)
    packed_mask_kernel(const __grid_constant__ PackedMaskParams<Source> p) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = thread; i < p.num_words; i += stride) {
    reinterpret_cast<uint32_t*>(p.packed)[i] = p.word(i);
  }
}

}  // namespace mk::mask
