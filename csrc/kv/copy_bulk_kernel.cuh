// The device code of copy_blocks by bulk copies: `Bulk` provides the instructions
// (bulk_instructions.cuh, or their substitute in tests/emulator).
#pragma once

#include "kv/bulk_ring.h"
#include "kv/copy_blocks_kernel.cuh"

namespace mk::kv {

// The chunks of one thread block, in order, without holes.
struct BulkCursor {
  int64_t chunk;  // the next to examine

  struct Found {
    const char* src;  // null: no more
    char* dst;
    int32_t num_bytes;
  };

  __device__ Found next(const CopyBlocksParams& p, const BulkRing& ring, BadId* bad) {
    for (; chunk < ring.num_chunks; chunk += gridDim.x) {
      BadId found;
      const Run run = p.run(ring.run(chunk), found);
      if (found.side != 0) report(bad, found);
      if (!run.src) continue;
      const int64_t offset = ring.offset(chunk);
      const Found result{run.src + offset, run.dst + offset, ring.num_bytes(chunk)};
      chunk += gridDim.x;
      return result;
    }
    return {nullptr, nullptr, 0};
  }
};

// One thread issues everything. Only the asynchronous proxy touches data: a load writes its stage
// and completes the phase of its barrier, and a store reads the stage after that phase was seen. So
// the only fence needed is the one after the barriers' initialization.
template <class Bulk>
__global__ void __launch_bounds__(32, 1)
    copy_bulk_kernel(const __grid_constant__ CopyBlocksParams p, const BulkRing ring, BadId* bad) {
  __shared__ uint64_t barriers[kMaxStages];
  __shared__ char* dsts[kMaxStages];  // target of each stage's content
  __shared__ int32_t sizes[kMaxStages];
  if (threadIdx.x != 0) return;
  char* const stages = Bulk::stages();
  for (int32_t i = 0; i < ring.num_stages; ++i) Bulk::make_barrier(&barriers[i]);
  Bulk::fence_barriers();

  BulkCursor cursor{static_cast<int64_t>(blockIdx.x)};
  int64_t loaded = 0, stored = 0;
  const auto load = [&](const BulkCursor::Found& found) {
    const int32_t stage = ring.stage(loaded++);
    dsts[stage] = found.dst;
    sizes[stage] = found.num_bytes;
    Bulk::load(stages + int64_t{stage} * ring.stage_bytes, found.src, found.num_bytes,
               &barriers[stage]);
  };
  bool has_more = true;
  while (has_more && loaded < ring.num_stages) {
    const BulkCursor::Found found = cursor.next(p, ring, bad);
    has_more = found.src;
    if (has_more) load(found);
  }
  while (stored < loaded) {
    const int32_t stage = ring.stage(stored);
    Bulk::wait(&barriers[stage], ring.parity(stored));
    Bulk::store(dsts[stage], stages + int64_t{stage} * ring.stage_bytes, sizes[stage]);
    ++stored;
    // Chunk number `loaded` reuses the stage of number loaded - num_stages, whose store is the
    // newest one issued apart from the last kStoresInFlight.
    if (!has_more || stored <= kStoresInFlight) continue;
    const BulkCursor::Found found = cursor.next(p, ring, bad);
    has_more = found.src;
    if (!has_more) continue;
    Bulk::template wait_for_reads<kStoresInFlight>();
    load(found);
  }
  Bulk::wait_for_writes();  // until then the block must keep its shared memory
}

}  // namespace mk::kv
