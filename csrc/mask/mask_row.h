// A row of a mask in canonical form, the rows of a batch, and the map from rows to requests.
//
//   const MaskRow row = rows.row(17, request);
//   row.for_each_run([&](int64_t begin, int64_t end) { ... });
//
// mooncake_kernels/mask/mask_rows.py defines the form. Layer: mask.
#pragma once

#include <cstdint>

#include "common/hd.h"
#include "mask/bits.h"

namespace mk::mask {

// The lengths of a batch, in device memory: read when a kernel runs.
struct BatchLengths {
  const int32_t* cu_q;  // [num_requests + 1]
  const int32_t* kv_lens;
  int64_t num_requests;

  MK_HD int64_t num_q() const { return cu_q[num_requests]; }
  MK_HD int64_t q_len(int64_t request) const { return cu_q[request + 1] - cu_q[request]; }

  // The request of a row below num_q(): the last nonempty one that begins at or before it.
  MK_HD int64_t request_of(int64_t row) const {
    int64_t low = 0, high = num_requests;  // finds the first whose rows end after the row
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      cu_q[middle + 1] <= row ? low = middle + 1 : high = middle;
    }
    return low;
  }
};

struct MaskRow {
  const int32_t* interval;  // lo0, hi0, lo1, hi1
  uint64_t tail;
  int64_t tail_base;

  // Calls use() for every run of keys that the row sees, in ascending order; runs do not touch.
  template <class Use>
  MK_HD void for_each_run(const Use& use) const {
    if (interval[0] < interval[1]) use(int64_t{interval[0]}, int64_t{interval[1]});
    if (interval[2] < interval[3]) use(int64_t{interval[2]}, int64_t{interval[3]});
    for (BitRuns runs(tail); runs.next();) use(tail_base + runs.begin, tail_base + runs.end);
  }

  // Bit i: whether the row sees key first + i.
  MK_HD uint64_t bits_from(int64_t first) const {
    return bits_between(interval[0] - first, interval[1] - first) |
           bits_between(interval[2] - first, interval[3] - first) |
           shifted(tail, tail_base - first);
  }
};

struct MaskRowsView {
  const int32_t* intervals;  // [num_q, 4]
  const int64_t* tail_bits;
  const int32_t* tail_base;  // [num_requests]
  BatchLengths lengths;

  MK_HD MaskRow row(int64_t row, int64_t request) const {
    return {intervals + 4 * row, static_cast<uint64_t>(tail_bits[row]), tail_base[request]};
  }
};

}  // namespace mk::mask
