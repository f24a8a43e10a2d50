#include <algorithm>

#include "common/cuda_check.h"
#include "mask/block_map_kernel.cuh"

namespace mk::mask {

void launch_block_map(const BlockMapParams& params, void* stream) {
  // At least one block: it writes the start of each request's q-blocks.
  const auto grid = static_cast<unsigned>(std::max<int64_t>(params.num_q_blocks, 1));
  block_map_kernel<<<grid, kMapThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  MK_CUDA(cudaGetLastError());
}

}  // namespace mk::mask
