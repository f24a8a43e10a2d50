// Request: the arguments of one call of write or read.
//
// Layer: transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/memory/region_table.h"

namespace mk::transfer {

class GpuFence;

enum class Direction { kWrite, kRead };  // as seen from the initiator: to the peer, from the peer

// Descriptor i moves size_of(i) bytes between the addresses local[i] and remote[i].
struct Request {
  Direction direction;
  std::vector<uint64_t> local;
  std::vector<uint64_t> remote;
  std::vector<uint64_t> sizes;           // a single one applies to all
  std::vector<uint64_t> unmerged_sizes;  // the original ones, if coalesce() has merged some
  uint64_t num_bytes;                    // the sum
  std::optional<std::string> notify;     // handed to the peer after the data
  bool verify = false;                   // by checksums, see checksum.h
  bool may_notify_again = false;         // a duplicate does no harm
  std::shared_ptr<GpuFence> after;       // null: it may begin at once
  std::vector<Range> local_pools;        // if known: all local ranges are inside one of these
  std::vector<RegionRef> regions;        // those of the local ranges
  bool is_distinct = false;              // no two targets overlap, as already known
  const char* op = "";                   // what the caller has called, for errors

  bool writes() const { return direction == Direction::kWrite; }
  size_t num_ranges() const { return local.size(); }
  const std::vector<uint64_t>& targets() const { return writes() ? remote : local; }
  uint64_t size_of(size_t i) const { return sizes[sizes.size() == 1 ? 0 : i]; }
  Ranges ranges(const std::vector<uint64_t>& addresses) const {
    return {addresses.data(), 1, sizes.data(), sizes.size() == 1 ? size_t{0} : 1, addresses.size()};
  }
};

}  // namespace mk::transfer
