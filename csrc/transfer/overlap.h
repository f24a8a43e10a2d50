// Overlap: whether ranges share a byte. What is written to from two places would depend on who came
// last.
//
//   if (auto pair = find_overlap(request.ranges(request.remote))) refuse(pair->first,
//   pair->second);
//
// Layer: transfer. Of every request, so it must cost next to nothing: one pass over ranges that
// ascend or descend; a bitmap, if they are of one size, aligned, and not too far apart; else a
// radix sort.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include "transfer/region_table.h"

namespace mk::transfer {

// Two of the ranges that overlap, the lower index first; nothing if there are none. No range is
// empty. One that would end behind 2^64 is taken to end there.
std::optional<std::pair<size_t, size_t>> find_overlap(const Ranges& ranges);

}  // namespace mk::transfer
