#include <algorithm>

#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "common/math.h"
#include "kv/transform_blocks.h"
#include "kv/transform_blocks_kernel.cuh"

namespace mk::kv {

constexpr int kTransformBlocksPerSm = 4;

void launch_transform_blocks(const TransformBlocksParams& p, BadId* bad, int max_sms,
                             void* stream) {
  if (p.copy.num_runs() == 0 || p.dim == 0) return;
  // As in copy_blocks.cu: only the number of thread blocks limits the multiprocessors.
  const int threads = max_sms > 0 ? kMaxTransformThreads : kThreads;
  const int most = max_sms > 0 ? max_sms : num_sms() * kTransformBlocksPerSm;
  with_transform_kernel(p, [&](auto kernel, const TransformTiling& tiling) {
    const int64_t wanted = ceil_div(tiling.num_tiles * kWarpThreads, threads);
    const auto grid = static_cast<unsigned>(std::min<int64_t>(wanted, most));
    kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(p, tiling, bad);
  });
  MK_CUDA(cudaGetLastError());
}

}  // namespace mk::kv
