// Span: a range of addresses.
//
// Layer: rdma.
#pragma once

#include <cstdint>

namespace mk::rdma {

struct Span {
  uint64_t address = 0;
  uint64_t num_bytes = 0;

  uint64_t end() const { return address + num_bytes; }
  bool contains(Span other) const {
    return other.address >= address && other.num_bytes <= num_bytes &&
           other.address - address <= num_bytes - other.num_bytes;
  }
  bool overlaps(Span other) const { return address < other.end() && other.address < end(); }
};

}  // namespace mk::rdma
