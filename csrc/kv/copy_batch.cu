#include <algorithm>
#include <memory>

#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "common/math.h"
#include "kv/copy_batch.h"
#include "kv/copy_batch_kernel.cuh"

namespace mk::kv {

constexpr int kBlocksPerSm = 8;  // of kBatchThreads: fills a multiprocessor with threads

void launch_copy_batch(const CopyRange* ranges, int64_t num_ranges, int max_sms, void* stream) {
  // As in copy_blocks.cu, only the number of blocks limits them to some multiprocessors.
  const int threads = max_sms > 0 ? kBatchMaxThreads : kBatchThreads;
  const int most = max_sms > 0 ? max_sms : num_sms() * kBlocksPerSm;
  const auto params = std::make_unique<CopyBatchParams>();  // 32 KB is a lot for a stack
  for (int64_t first = 0; first < num_ranges; first += kMaxRanges) {
    fill_params(*params, ranges + first, std::min<int64_t>(kMaxRanges, num_ranges - first));
    const int64_t wanted = ceil_div(params->num_tiles * kBatchLanes, threads);
    const auto grid = static_cast<unsigned>(std::min<int64_t>(wanted, most));
    copy_batch_kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(*params);
    MK_CUDA(cudaGetLastError());
  }
}

}  // namespace mk::kv
