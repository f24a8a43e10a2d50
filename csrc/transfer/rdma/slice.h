// Slice: what a rail moves at once.
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <list>
#include <vector>

#include "rdma/work.h"
#include "transfer/memory/nics.h"

namespace mk::transfer {

// A part of a work that one rail moves at once: in one region at either end.
struct Slice {
  uint64_t work = 0;  // of RdmaChannel's
  bool reads = false;
  NicMemoryRef local;
  std::vector<rdma::Segment> segments;
  uint64_t num_bytes = 0;
  int num_tries = 0;
  uint64_t token = 0;  // of the rail's
};
// They are moved from list to list, and those that are over to a list of spare ones, whose buffers
// are used again: none is allocated anew while a transfer goes on.
using Slices = std::list<Slice>;

// Appends an empty one.
inline Slice& append(Slices& slices, Slices& spare) {
  if (spare.empty()) return slices.emplace_back();
  slices.splice(slices.end(), spare, spare.begin());
  return slices.back();
}

// They no longer hold their memory.
inline void give_back(Slices& over, Slices& spare) {
  for (Slice& slice : over) {
    slice.local.reset();
    slice.segments.clear();
    slice.num_bytes = 0;
    slice.num_tries = 0;
  }
  spare.splice(spare.end(), over);
}

}  // namespace mk::transfer
