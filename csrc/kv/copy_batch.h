// copy_batch: copies a list of byte ranges of any length between any addresses.
//
//   for r in ranges: memcpy(r.dst, r.src, r.num_bytes)
//
// Layer: kv. Python: mooncake_kernels/kv/batch.py.
#pragma once

#include <cstdint>

#include "common/hd.h"
#include "kv/copy_range.h"

namespace mk::kv {

constexpr int kMaxRanges = 1000;  // per launch: 32,016 of the 32,764 bytes a kernel may be given
constexpr int64_t kTileBytes = 4096;  // what a warp takes at a time, of one range

// The list is part of the launch, so that its memory need not outlive the call, and a CUDA graph
// keeps it. Ranges are cut into consecutively numbered tiles.
struct CopyBatchParams {
  int64_t num_ranges;
  int64_t num_tiles;
  const char* src[kMaxRanges];
  char* dst[kMaxRanges];
  int64_t num_bytes[kMaxRanges];
  int64_t first_tile[kMaxRanges];

  // The range that a tile belongs to: the last one whose first tile is not after it.
  MK_HD int64_t range_of(int64_t tile) const {
    int64_t low = 0, high = num_ranges - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  // The part of the range in that tile, at most one tile long.
  MK_HD CopyRange tile(int64_t tile) const {
    const int64_t range = range_of(tile), offset = (tile - first_tile[range]) * kTileBytes;
    const int64_t left = num_bytes[range] - offset;
    return {src[range] + offset, dst[range] + offset, left < kTileBytes ? left : kTileBytes};
  }
};

// At most kMaxRanges ranges, none of them empty.
void fill_params(CopyBatchParams& params, const CopyRange* ranges, int64_t num_ranges);

// Of all the bytes of the ranges, laid end to end, copies those in [begin, end), on the calling
// thread; `ends[i]` is the end of range i among them.
void copy_batch_host(const CopyRange* ranges, const int64_t* ends, int64_t num_ranges,
                     int64_t begin, int64_t end);

// All ranges, queued on `stream` (a cudaStream_t) of the current device, which must be able to
// reach every address, on at most `max_sms` multiprocessors (0: all). Throws CudaError.
void launch_copy_batch(const CopyRange* ranges, int64_t num_ranges, int max_sms, void* stream);

}  // namespace mk::kv
