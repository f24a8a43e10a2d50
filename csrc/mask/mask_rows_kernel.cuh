// The device code of mask_rows: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "mask/mask_rows.h"

namespace mk::mask {

constexpr int kRowThreads = 128;

// Each thread handles a row, and then a request.
__global__ void __launch_bounds__(kRowThreads)
    mask_rows_kernel(const __grid_constant__ MaskRowsParams p) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (thread < p.num_rows) p.fill_row(thread);
  if (thread < p.lengths.num_requests) p.fill_request(thread);
}

}  // namespace mk::mask
