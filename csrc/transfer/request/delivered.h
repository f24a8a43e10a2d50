// Which descriptors of a request that failed have arrived.
//
//   ticket->finish(reason, num_bytes_done, whole_descriptors(request, confirmed));
//
// Layer: transfer.
#pragma once

#include <vector>

#include "transfer/request/request.h"

namespace mk::transfer {

// For each descriptor, as the caller has given them, whether all of it is in the `confirmed` ranges
// of the request's bytes, which are disjoint, in any order. Merging descriptors (coalesce.h) does
// not change where their bytes are among these.
std::vector<bool> whole_descriptors(const Request& request, std::vector<Range> confirmed);

}  // namespace mk::transfer
