// The device code of pack_signs: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "similarity/pack_signs.h"

namespace mk::similarity {

constexpr int kPackThreads = 256;
constexpr int kPackWarp = 32;

// Each lane reads a value, and the warp votes; neighbours read neighbouring values.
__global__ void __launch_bounds__(kPackThreads)
    pack_signs_kernel(const __grid_constant__ PackSignsParams p) {
  const int64_t num_values = 8 * p.num_bytes;
  const int64_t stride = int64_t{gridDim.x} * kPackThreads;
  const int lane = threadIdx.x % kPackWarp;
  // All lanes of a warp iterate equally often, as all of them must vote.
  for (int64_t first = int64_t{blockIdx.x} * kPackThreads + threadIdx.x - lane; first < num_values;
       first += stride) {
    const int64_t value = first + lane;
    const bool is_inside = value < num_values;
    const unsigned bits = __ballot_sync(~0u, is_inside && p.is_set(value));
    if (is_inside && lane % 8 == 0) p.packed[value / 8] = static_cast<uint8_t>(bits >> lane);
  }
}

}  // namespace mk::similarity
