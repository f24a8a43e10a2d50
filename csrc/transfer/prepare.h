// What a request goes through before a channel sees it: it is checked, as far as that can be done
// without the peer, and coalesced.
//
//   prepare(own_regions, request);
//
// Layer: transfer.
#pragma once

#include "transfer/request.h"

namespace mk::transfer {

// Fills in request.regions. Throws InvalidArgument, in the words of a write or read: nothing to do,
// an empty descriptor, a local range outside the regions, two targets that overlap, a notification
// that is too long.
void prepare(const RegionTable& own_regions, Request& request);

}  // namespace mk::transfer
