// cut: cuts a piece into slices for rails; RemoteKeys: what determines the cuts.
//
//   if (!cut(request, piece, keys, 64 << 10, slices, spare)) ...   // NICs cannot move some of it
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/rdma/slice.h"
#include "transfer/request/piece.h"
#include "transfer/request/request.h"
#include "transfer/wire/nic_wire.h"

namespace mk::transfer {

// The peer's regions, by address.
class RemoteKeys {
 public:
  RemoteKeys() = default;
  // Adds regions, by address; they replace those they overlap.
  void add(std::vector<RemoteRegion> regions);

  // The region that contains the range; null: none.
  const RemoteRegion* find(const Range& range) const;
  // The one that contains all of the slice.
  const RemoteRegion* find(const Slice& slice) const;

 private:
  std::vector<RemoteRegion> regions_;  // by address
};

// Slices of `slice_bytes`; the remainder is part of the last of them if it is a quarter or less.
// Takes them from `spare` as far as there are any. False if not all of the piece is in memory that
// NICs of both sides know, with the required rights.
bool cut(const Request& request, const Piece& piece, const RemoteKeys& keys, uint64_t slice_bytes,
         Slices& slices, Slices& spare);

}  // namespace mk::transfer
