#include <algorithm>

#include "common/cuda_check.h"
#include "common/math.h"
#include "mask/packed_mask_kernel.cuh"

namespace mk::mask {
namespace {

constexpr int64_t kMaxBlocks = 1 << 20;

}  // namespace

template <class Source>
void launch_packed_mask(const PackedMaskParams<Source>& params, void* stream) {
  if (params.num_words == 0) return;
  const int64_t wanted = ceil_div(params.num_words, kPackThreads);
  const auto grid = static_cast<unsigned>(std::min(wanted, kMaxBlocks));
  packed_mask_kernel<<<grid, kPackThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  MK_CUDA(cudaGetLastError());
}

template void launch_packed_mask(const PackedMaskParams<BitsOfRows>&, void*);
template void launch_packed_mask(const PackedMaskParams<BitsOfRule>&, void*);

}  // namespace mk::mask
