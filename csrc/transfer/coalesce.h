// Coalescing: descriptors that continue one another at both ends become one, so that tables are
// shorter, copies and work requests larger, and fewer of them.
//
//   coalesce(request);
//   if (refused && split(request)) ask_again();   // as it was, now
//
// Layer: transfer. The peer's regions are not known here: it may refuse a range because its parts
// lie in two regions, and it cannot say which of the caller's descriptors is at fault. So a request
// that is refused, of which nothing has moved, is split and asked for once more.
#pragma once

#include "transfer/request.h"

namespace mk::transfer {

// One pass; what has nothing to merge is left as it is. A merged range stays inside one of
// request.regions, and has no part of its source in its target unless the two are the same.
void coalesce(Request& request);

// Undoes it. False: there was nothing to undo.
bool split(Request& request);

}  // namespace mk::transfer
