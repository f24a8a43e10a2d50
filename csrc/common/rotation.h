// How rotary embedding turns the pairs of a row, from tables of cosines and sines. Layer: common.
// Python: mooncake_kernels/transforms.py (Rope).
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk {

// Keys at position p, with angles p * frequency[j], move to p + delta: each pair is turned by delta
// * frequency[j], the same for all tokens of a piece.
struct Rotation {
  const float* cos_sin;  // [num_pieces][2][num_pairs]; null: no rotation
  int64_t first;         // element of a row at which the pairs begin
  int64_t num_pairs;
  bool interleaved;  // pairs are (2j, 2j + 1); otherwise (j, j + num_pairs)

  MK_HD const float* of(int64_t piece) const { return cos_sin + piece * num_pairs * 2; }
  MK_HD int64_t x(int64_t pair) const { return first + (interleaved ? 2 * pair : pair); }
  MK_HD int64_t y(int64_t pair) const { return x(pair) + (interleaved ? 1 : num_pairs); }
};

}  // namespace mk
