// The device code of copy_blocks: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "kv/copy_blocks.h"

namespace mk::kv {

constexpr int kThreads = 256;
constexpr int kMaxThreads = 1024;     // of a block with a multiprocessor to itself
constexpr int kVectorsPerThread = 4;  // loads in flight per thread

// How runs are divided among threads: a group of threads takes a tile of a run at a time.
struct CopyBlocksTiling {
  int32_t group;  // threads, a power of two up to 32: leaves few threads idle on small runs
  int64_t vectors_per_run;
  int64_t tiles_per_run;  // of group * kVectorsPerThread vectors each
  int64_t num_tiles;
};

// The host polls `side` without waiting for the kernel, so it is set last.
__device__ inline void report(BadId* bad, const BadId& found) {
  if (!bad) return;
  auto* side = reinterpret_cast<unsigned long long*>(&bad->side);
  if (atomicCAS(side, 0ull, static_cast<unsigned long long>(kBadIdClaimed)) == 0ull) {
    bad->index = found.index;
    bad->id = found.id;
    __threadfence_system();
    *const_cast<volatile int64_t*>(&bad->side) = found.side;
  }
}

// Neighbouring threads take neighbouring vectors, so that both sides are accessed in whole sectors.
// All loads of a tile are issued before its first store.
template <class Vector>
__global__ void __launch_bounds__(kMaxThreads)
    copy_blocks_kernel(const __grid_constant__ CopyBlocksParams p, const CopyBlocksTiling tiling,
                       BadId* bad) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t num_groups = int64_t{gridDim.x} * blockDim.x / tiling.group;
  const int64_t lane = thread % tiling.group;

  for (int64_t tile = thread / tiling.group; tile < tiling.num_tiles; tile += num_groups) {
    BadId found;
    const Run run = p.run(tile / tiling.tiles_per_run, found);
    if (found.side != 0 && lane == 0) report(bad, found);
    if (!run.src) continue;

    const auto* src = reinterpret_cast<const Vector*>(run.src);
    auto* dst = reinterpret_cast<Vector*>(run.dst);
    const int64_t first = tile % tiling.tiles_per_run * tiling.group * kVectorsPerThread + lane;
    Vector vectors[kVectorsPerThread];
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
      const int64_t v = first + k * tiling.group;
      if (v < tiling.vectors_per_run) vectors[k] = src[v];
    }
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
      const int64_t v = first + k * tiling.group;
      if (v < tiling.vectors_per_run) dst[v] = vectors[k];
    }
  }
}

template <class Vector>
CopyBlocksTiling tile_runs(const CopyBlocksParams& p) {
  CopyBlocksTiling tiling{};
  tiling.vectors_per_run = p.run_bytes / int64_t{sizeof(Vector)};
  tiling.group = 1;
  while (tiling.group < 32 && tiling.group * kVectorsPerThread < tiling.vectors_per_run) {
    tiling.group *= 2;
  }
  const int64_t vectors_per_tile = int64_t{tiling.group} * kVectorsPerThread;
  tiling.tiles_per_run = (tiling.vectors_per_run + vectors_per_tile - 1) / vectors_per_tile;
  tiling.num_tiles = tiling.tiles_per_run * p.num_runs();
  return tiling;
}

}  // namespace mk::kv
