// Gate: shared state of a server's sessions, by which they decide which peers to admit.
//
// Layer: transfer.
#pragma once

#include "transfer/net/admission.h"
#include "transfer/net/links.h"

namespace mk::transfer {

struct Gate {
  Admission admission;
  Links links;
};

}  // namespace mk::transfer
