// Coalescing: merges descriptors that are consecutive at both ends, so that tables are shorter and
// copies and work requests fewer and larger.
//
//   coalesce(request);
//   if (refused && split(request)) ask_again();   // as it was, now
//
// Layer: transfer. The peer's regions are not known here: it may refuse a range because its parts
// are in two regions, without knowing which of the caller's descriptors is at fault. So a refused
// request, of which nothing has moved, is split and sent once more.
#pragma once

#include "transfer/request/request.h"

namespace mk::transfer {

// One pass; a request without anything to merge is unchanged. A merged range stays inside one of
// request.regions, and its source and target do not overlap unless they are the same.
void coalesce(Request& request);

// Undoes it. False: there is nothing to undo.
bool split(Request& request);

}  // namespace mk::transfer
