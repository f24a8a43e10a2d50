// Gate: shared state of a server's sessions, by which they decide which peers to admit.
//
// Layer: transfer.
#pragma once

#include "transfer/admission.h"
#include "transfer/links.h"

namespace mk::transfer {

struct Gate {
  Admission admission;
  Links links;
};

}  // namespace mk::transfer
