#include <algorithm>

#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "common/math.h"
#include "kv/copy_blocks.h"
#include "kv/copy_blocks_kernel.cuh"

namespace mk::kv {
namespace {

constexpr int kBlocksPerSm = 8;  // of kThreads: fills a multiprocessor with threads

template <class Vector>
void launch(const CopyBlocksParams& p, BadId* bad, int max_sms, cudaStream_t stream) {
  const CopyBlocksTiling tiling = tile_runs<Vector>(p);
  // The hardware spreads thread blocks over all multiprocessors, so only their number can limit
  // them to some: one large block per multiprocessor that may be used.
  const int threads = max_sms > 0 ? kMaxThreads : kThreads;
  const int most = max_sms > 0 ? max_sms : num_sms() * kBlocksPerSm;
  const int64_t wanted = ceil_div(tiling.num_tiles * tiling.group, threads);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(wanted, most));
  copy_blocks_kernel<Vector><<<grid, threads, 0, stream>>>(p, tiling, bad);
  MK_CUDA(cudaGetLastError());
}

}  // namespace

void launch_copy_blocks(const CopyBlocksParams& p, BadId* bad, int max_sms, void* stream) {
  if (p.num_runs() == 0 || p.run_bytes == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int alignment = p.alignment();
  if (alignment >= 16) return launch<uint4>(p, bad, max_sms, cuda_stream);  // every usual KV shape
  if (alignment >= 4) return launch<uint32_t>(p, bad, max_sms, cuda_stream);
  return launch<uint8_t>(p, bad, max_sms, cuda_stream);  // correct, but slow
}

}  // namespace mk::kv
