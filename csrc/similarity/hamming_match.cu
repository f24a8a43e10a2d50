#include <algorithm>

#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "common/math.h"
#include "similarity/hamming_match_kernel.cuh"

namespace mk::similarity {
namespace {

constexpr int64_t kBlocksPerSm = 8;  // if queries are few, references are divided among blocks

// The number of parts into which the references of a block's queries are cut.
int64_t num_parts(const HammingMatchParams& p, int64_t query_blocks) {
  const int64_t references = std::min(p.num_references, 2 * p.window + kMatchThreads);
  const int64_t most = std::max<int64_t>(ceil_div(references, kMatchTile), 1);
  return std::min(ceil_div(kBlocksPerSm * num_sms(), query_blocks), most);
}

}  // namespace

void launch_hamming_match(const HammingMatchParams& p, void* stream) {
  if (p.num_queries == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  const int64_t query_blocks = ceil_div(p.num_queries, kMatchThreads);
  const dim3 grid(static_cast<unsigned>(query_blocks),
                  static_cast<unsigned>(num_parts(p, query_blocks)));
  static_assert(kNoKey == ~uint64_t{0});  // all bytes are 0xff
  MK_CUDA(cudaMemsetAsync(p.index, 0xff, p.num_queries * sizeof(*p.index), on));
  with_match_kernel(p, [&](auto kernel) { kernel<<<grid, kMatchThreads, 0, on>>>(p); });
  MK_CUDA(cudaGetLastError());
  hamming_store_kernel<<<grid.x, kMatchThreads, 0, on>>>(p);
  MK_CUDA(cudaGetLastError());
}

}  // namespace mk::similarity
