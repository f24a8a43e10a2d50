// Credentials: how an engine authenticates itself, and what it requires of its peers.
//
// Layer: transfer.
#pragma once

#include <memory>

#include "transfer/net/local_users.h"
#include "transfer/net/secret.h"
#include "transfer/net/tls.h"

namespace mk::transfer {

struct Credentials {
  std::shared_ptr<const Secret> secret;   // null: none, and peers with one are refused
  std::shared_ptr<const TlsContext> tls;  // null: plain TCP
  LocalUsers local_users;                 // who may connect within the machine
};

}  // namespace mk::transfer
