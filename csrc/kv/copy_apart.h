// Whether any of several ranges, copied concurrently in any order, writes what another one reads or
// writes.
//
//   if (auto conflict = find_conflict(touched)) refuse(conflict->first, conflict->second);
//
// Layer: kv.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kv/copy_range.h"

namespace mk::kv {

// One side of a range.
struct Touched {
  uint64_t begin;  // an address below 2^63
  uint64_t num_bytes;
  int64_t index;  // of its range
  bool is_written;

  uint64_t end() const { return begin + num_bytes; }
};

// The first two, by address, where one writes what the other touches; `second` is written.
struct Conflict {
  Touched first, second;
};

std::optional<Conflict> find_conflict(std::vector<Touched> touched);

// Both sides of all ranges, or only those that could meet: if sources and targets lie apart,
// sources are omitted; if the targets also ascend or descend, they are omitted, too.
std::vector<Touched> what_may_meet(const std::vector<CopyRange>& ranges);

}  // namespace mk::kv
