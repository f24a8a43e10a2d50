// Overlap: whether ranges share a byte. The result of writing twice to one place would depend on
// which write came last.
//
//   const auto pair = find_overlap(request.ranges(request.remote));
//   if (pair) refuse(pair->first, pair->second);
//
// Layer: transfer. Run for every request, so it must cost next to nothing: one pass over ranges
// that ascend or descend; a table of bytes or bits, if they have one size, are aligned, and not too
// far apart; else a radix sort.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include "transfer/memory/region_table.h"

namespace mk::transfer {

// Two of the ranges that overlap, the lower index first; nothing if there are none. No range is
// empty. One that would end after 2^64 is taken to end there.
std::optional<std::pair<size_t, size_t>> find_overlap(const Ranges& ranges);

}  // namespace mk::transfer
