// cut: makes slices for rails of a piece, and RemoteKeys: what they are cut by.
//
//   if (!cut(request, piece, keys, 64 << 10, slices)) ...   // some of it no NIC can move
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/nic_wire.h"
#include "transfer/piece.h"
#include "transfer/rail.h"
#include "transfer/request.h"

#if MK_HAVE_VERBS
namespace mk::transfer {

// The peer's regions, by address.
class RemoteKeys {
 public:
  RemoteKeys() = default;
  // What has been told since, by address; what it overlaps is gone.
  void add(std::vector<RemoteRegion> regions);

  // The region that the range is in; null: none.
  const RemoteRegion* find(const Range& range) const;
  // The one that a slice is in, all of it.
  const RemoteRegion* find(const Slice& slice) const;

 private:
  std::vector<RemoteRegion> regions_;  // by address
};

// Slices of `slice_bytes`, and what is left over: with the last of them, if it is a quarter or
// less. False if not all of the piece is in memory that NICs of both sides know, with the right to
// it.
bool cut(const Request& request, const Piece& piece, const RemoteKeys& keys, uint64_t slice_bytes,
         std::vector<Slice>& slices);

}  // namespace mk::transfer
#endif
