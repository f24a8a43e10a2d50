// The ranges of a q-block's tiles, computed word by word: where they begin and end, and the longest
// run of full tiles.
//
//   TileRanges ranges;
//   ranges.add(0, any_bits, full_bits);      // tiles 0 to 31, one bit each
//   ranges.add(32, ...);
//   ranges.store(out);
//
// Layer: mask.
#pragma once

#include <cstdint>

#include "common/hd.h"
#include "mask/bits.h"

namespace mk::mask {

struct TileRanges {
  int64_t begin = -1, end = 0;           // of the tiles that are not empty; begin -1: none
  int64_t full_begin = 0, full_end = 0;  // the first of the longest runs
  int64_t run_begin = 0, run_end = -1;   // the last run of full tiles

  MK_HD void add(int64_t first, uint32_t any, uint32_t full) {
    if (!any) return;
    const int lowest = trailing_zeros(any);
    if (begin < 0) begin = first + lowest;
    BitRuns all(any);
    while (all.next()) end = first + all.end;
    for (BitRuns runs(full); runs.next();) {
      if (run_end != first + runs.begin) run_begin = first + runs.begin;
      run_end = first + runs.end;
      if (run_end - run_begin > full_end - full_begin) {
        full_begin = run_begin;
        full_end = run_end;
      }
    }
  }

  MK_HD void store(int32_t* out) const {
    const int64_t kv_begin = begin < 0 ? 0 : begin;
    const bool has_full = full_end > full_begin;
    out[0] = static_cast<int32_t>(kv_begin);
    out[1] = static_cast<int32_t>(has_full ? full_begin : kv_begin);
    out[2] = static_cast<int32_t>(has_full ? full_end : kv_begin);
    out[3] = static_cast<int32_t>(end);
  }
};

}  // namespace mk::mask
