// The runs of a copy as a list of ranges, for copiers that take lists, such as the copy engines.
//
//   for plane: for p in pieces: for a: for b: ranges += run   # joined with the last if possible
//
// Unlike in copy_blocks, planes are outermost, so that blocks adjacent on both sides become one
// range. Layer: kv.
#pragma once

#include <vector>

#include "kv/copy_blocks.h"
#include "kv/copy_range.h"

namespace mk::kv {

// Appends the runs of `params`, whose ids must be good. Ranges of different planes are not joined:
// they may be in two allocations.
void list_runs(const CopyBlocksParams& params, std::vector<CopyRange>& ranges);

}  // namespace mk::kv
