// Credentials: how an engine proves who it is, and what it asks of its peers.
//
// Layer: transfer.
#pragma once

#include <memory>

#include "transfer/secret.h"
#include "transfer/tls.h"

namespace mk::transfer {

struct Credentials {
  std::shared_ptr<const Secret> secret;   // null: none, and peers that have one are refused
  std::shared_ptr<const TlsContext> tls;  // null: plain TCP
};

}  // namespace mk::transfer
