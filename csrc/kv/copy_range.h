// CopyRange: so many bytes from here to there.
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

// Makes one of two ranges if `next` goes on where `range` ends, on both sides; says whether. One
// that would overlap itself is not made: what one range writes and another reads is not defined,
// and shall stay harmless.
inline bool join(CopyRange& range, const CopyRange& next) {
  const CopyRange joined{range.src, range.dst, range.num_bytes + next.num_bytes};
  const bool continues =
      range.src + range.num_bytes == next.src && range.dst + range.num_bytes == next.dst;
  if (!continues || overlaps_itself(joined)) return false;
  range = joined;
  return true;
}

}  // namespace mk::kv
