#include "kv/copy_each.h"

#include "common/cuda_check.h"

namespace mk::kv {

void launch_copy_each(const CopyRange* ranges, int64_t num_ranges, void* stream) {
  for (int64_t i = 0; i < num_ranges; ++i) {
    const CopyRange& range = ranges[i];
    const auto num_bytes = static_cast<size_t>(range.num_bytes);
    MK_CUDA(cudaMemcpyAsync(range.dst, range.src, num_bytes, cudaMemcpyDefault,
                            static_cast<cudaStream_t>(stream)));
  }
}

}  // namespace mk::kv
