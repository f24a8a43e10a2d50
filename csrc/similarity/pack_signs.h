// pack_signs: the signs of numbers as one bit each, for SimHash signatures.
//
//   bit b of row t: values[t][b] >= 0, in byte b / 8 at b % 8, counted from the lowest
//
// Minus zero counts as zero, and NaN as negative.
//
// Layer: similarity. Python: mooncake_kernels/similarity.py.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk::similarity {

// A row has whole bytes, so all rows together are one row.
struct PackSignsParams {
  const float* values;  // [8 * num_bytes]
  uint8_t* packed;      // [num_bytes]
  int64_t num_bytes;

  MK_HD bool is_set(int64_t value) const { return values[value] >= 0; }
};

// Bytes [begin, end), on the calling thread.
void pack_signs_host(const PackSignsParams& params, int64_t begin, int64_t end);

// Queued on the stream, a cudaStream_t.
void launch_pack_signs(const PackSignsParams& params, void* stream);

}  // namespace mk::similarity
