#include <algorithm>

#include "common/cuda_check.h"
#include "common/math.h"
#include "mask/mask_rows_kernel.cuh"

namespace mk::mask {

void launch_mask_rows(const MaskRowsParams& params, void* stream) {
  const int64_t threads = std::max(params.num_rows, params.lengths.num_requests);
  if (threads == 0) return;
  const auto grid = static_cast<unsigned>(ceil_div(threads, kRowThreads));
  mask_rows_kernel<<<grid, kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  MK_CUDA(cudaGetLastError());
}

}  // namespace mk::mask
