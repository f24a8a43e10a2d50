#include <algorithm>

#include "attention/merge_attention_kernel.cuh"
#include "common/cuda_check.h"
#include "common/math.h"

namespace mk::attention {

void launch_merge_attention(const MergeAttentionParams& p, void* stream) {
  constexpr int64_t kMostBlocks = 1 << 16;
  if (p.num_rows == 0) return;
  const int64_t wanted = ceil_div(p.num_rows * kMergeWarp, kMergeThreads);
  const auto grid = static_cast<unsigned>(std::min(wanted, kMostBlocks));
  with_merge_kernel(p, [&](auto kernel) {
    kernel<<<grid, kMergeThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  });
  MK_CUDA(cudaGetLastError());
}

}  // namespace mk::attention
