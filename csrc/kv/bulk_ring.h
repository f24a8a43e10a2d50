// The ring of copy_blocks by bulk copies: which part of which run is in which stage when. This
// arithmetic is separate from the instructions, so that the CPU can test it.
//
// Runs are cut into consecutively numbered chunks; a thread block takes every grid-th of them. It
// counts its chunks, skipping holes: its n-th chunk goes through stage n % num_stages, whose
// barrier completes one phase per chunk, so parity n / num_stages % 2 is the one to wait for.
// Layer: kv.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/hd.h"

namespace mk::kv {

constexpr int64_t kBulkAlignment = 16;  // of every address and size, as the instructions require
constexpr int32_t kMaxStages = 32;
constexpr int64_t kRingBytes = 192 << 10;  // of the 227 KiB of shared memory available to a block
constexpr int64_t kMaxStageBytes = 32 << 10;
// Stores that may still be reading their stage when the next load is issued: there must be at least
// two more stages than that.
constexpr int kStoresInFlight = 2;
static_assert(kRingBytes / kMaxStageBytes >= kStoresInFlight + 2);

struct BulkRing {
  int64_t run_bytes;
  int64_t chunks_per_run;
  int64_t num_chunks;
  int32_t stage_bytes;
  int32_t num_stages;

  MK_HD int64_t run(int64_t chunk) const { return chunk / chunks_per_run; }
  MK_HD int64_t offset(int64_t chunk) const { return chunk % chunks_per_run * stage_bytes; }
  MK_HD int32_t num_bytes(int64_t chunk) const {
    const int64_t left = run_bytes - offset(chunk);
    return static_cast<int32_t>(left < stage_bytes ? left : stage_bytes);
  }

  MK_HD int32_t stage(int64_t number) const { return static_cast<int32_t>(number % num_stages); }
  MK_HD uint32_t parity(int64_t number) const {
    return static_cast<uint32_t>(number / num_stages % 2);
  }
};

// Runs must not be empty.
inline BulkRing make_ring(int64_t run_bytes, int64_t num_runs) {
  BulkRing ring{};
  ring.run_bytes = run_bytes;
  ring.stage_bytes = static_cast<int32_t>(std::min(run_bytes, kMaxStageBytes));
  ring.num_stages =
      static_cast<int32_t>(std::min<int64_t>(kMaxStages, kRingBytes / ring.stage_bytes));
  ring.chunks_per_run = (run_bytes + ring.stage_bytes - 1) / ring.stage_bytes;
  ring.num_chunks = ring.chunks_per_run * num_runs;
  return ring;
}

}  // namespace mk::kv
