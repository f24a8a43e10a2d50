// The device code of copy_batch: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "kv/copy_batch.h"

namespace mk::kv {

constexpr int kBatchThreads = 256;
constexpr int kBatchMaxThreads = 1024;     // of a block with a multiprocessor to itself
constexpr int kBatchLanes = 32;            // a warp takes a tile
constexpr int kBatchVectorsPerThread = 4;  // loads in flight per thread

// Neighbouring lanes take neighbouring vectors. All loads of a step are issued before its first
// store: over PCIe a load takes a microsecond, which only the number of loads hides.
template <class Vector>
__device__ inline void copy_tile(const CopyRange& tile, int lane) {
  const auto* src = reinterpret_cast<const Vector*>(tile.src);
  auto* dst = reinterpret_cast<Vector*>(tile.dst);
  const int num_vectors = static_cast<int>(tile.num_bytes / int64_t{sizeof(Vector)});
  for (int first = lane; first < num_vectors; first += kBatchLanes * kBatchVectorsPerThread) {
    Vector vectors[kBatchVectorsPerThread];
#pragma unroll
    for (int k = 0; k < kBatchVectorsPerThread; ++k) {
      const int v = first + k * kBatchLanes;
      if (v < num_vectors) vectors[k] = src[v];
    }
#pragma unroll
    for (int k = 0; k < kBatchVectorsPerThread; ++k) {
      const int v = first + k * kBatchLanes;
      if (v < num_vectors) dst[v] = vectors[k];
    }
  }
  const int rest = num_vectors * static_cast<int>(sizeof(Vector));
  for (int i = rest + lane; i < tile.num_bytes; i += kBatchLanes) tile.dst[i] = tile.src[i];
}

__global__ void __launch_bounds__(kBatchMaxThreads)
    copy_batch_kernel(const __grid_constant__ CopyBatchParams p) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / kBatchLanes;
  const int lane = static_cast<int>(thread % kBatchLanes);
  for (int64_t i = thread / kBatchLanes; i < p.num_tiles; i += num_warps) {
    const CopyRange tile = p.tile(i);
    const auto bits = reinterpret_cast<uintptr_t>(tile.src) | reinterpret_cast<uintptr_t>(tile.dst);
    if (bits % sizeof(uint4) == 0) {  // true for every range of a usual cache
      copy_tile<uint4>(tile, lane);
    } else if (bits % sizeof(uint32_t) == 0) {
      copy_tile<uint32_t>(tile, lane);
    } else {
      copy_tile<uint8_t>(tile, lane);
    }
  }
}

}  // namespace mk::kv
