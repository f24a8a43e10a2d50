// Request: what one call of write or read asks for.
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transfer/region_table.h"

namespace mk::transfer {

enum class Direction { kWrite, kRead };  // as seen from the initiator: to the peer, from the peer

// Descriptor i moves local[i].num_bytes (= remote[i].num_bytes) between local[i] and remote[i].
struct Request {
  Direction direction;
  std::vector<Range> local;
  std::vector<Range> remote;
  uint64_t num_bytes;                 // the sum
  std::optional<std::string> notify;  // handed to the peer after the data
  std::vector<RegionRef> regions;     // those of the local ranges

  bool writes() const { return direction == Direction::kWrite; }
};

}  // namespace mk::transfer
