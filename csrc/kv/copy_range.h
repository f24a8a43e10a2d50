// CopyRange: a contiguous copy of some bytes.
//
// Layer: kv.
#pragma once

#include <cstdint>

namespace mk::kv {

struct CopyRange {
  const char* src;
  char* dst;
  int64_t num_bytes;
};

inline bool overlaps_itself(const CopyRange& range) {
  const char* const dst = range.dst;
  return range.src < dst + range.num_bytes && dst < range.src + range.num_bytes;
}

// Merges `next` into `range` if it continues it on both sides; returns whether it did. Does not
// create a range that overlaps itself: if one range writes what another reads the result is
// undefined, but must stay harmless.
inline bool join(CopyRange& range, const CopyRange& next) {
  const CopyRange joined{range.src, range.dst, range.num_bytes + next.num_bytes};
  const bool continues =
      range.src + range.num_bytes == next.src && range.dst + range.num_bytes == next.dst;
  if (!continues || overlaps_itself(joined)) return false;
  range = joined;
  return true;
}

}  // namespace mk::kv
