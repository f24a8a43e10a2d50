// Gate: what the sessions of a server share, by which they decide whom to let in.
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
