#include <algorithm>

#include "common/cuda_check.h"
#include "common/math.h"
#include "similarity/pack_signs_kernel.cuh"

namespace mk::similarity {

void launch_pack_signs(const PackSignsParams& p, void* stream) {
  constexpr int64_t kMostBlocks = 1 << 16;
  if (p.num_bytes == 0) return;
  const int64_t wanted = ceil_div(8 * p.num_bytes, kPackThreads);
  const auto grid = static_cast<unsigned>(std::min(wanted, kMostBlocks));
  pack_signs_kernel<<<grid, kPackThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  MK_CUDA(cudaGetLastError());
}

}  // namespace mk::similarity
