// The runs of a copy as a list of ranges: for what takes lists, as the copy engines do.
//
//   for plane: for p in pieces: for a: for b: ranges += run   # joined with the last one, if it can
//
// Planes are outermost, unlike in copy_blocks: so blocks that follow each other on both sides
// become one range. Layer: kv.
#pragma once

#include <vector>

#include "kv/copy_blocks.h"
#include "kv/copy_range.h"

namespace mk::kv {

// Appends what the params tell, whose ids must be good. Ranges of two planes are not joined: they
// may be in two allocations.
void list_runs(const CopyBlocksParams& params, std::vector<CopyRange>& ranges);

}  // namespace mk::kv
