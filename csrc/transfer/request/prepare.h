// Preparation of a request for the channels: it is checked, as far as possible without the peer,
// and coalesced.
//
//   prepare(own_regions, request);
//
// Layer: transfer.
#pragma once

#include "transfer/request/request.h"

namespace mk::transfer {

// Fills in request.regions. Throws InvalidArgument, worded for a write or read: nothing to do, an
// empty descriptor, a local range outside the regions, two targets that overlap, a notification
// that is too long.
void prepare(const RegionTable& own_regions, Request& request);

}  // namespace mk::transfer
