// The first words on a connection, the same in both directions.
//
// Layer: transfer.
#pragma once

#include <string>

#include "transfer/endpoint.h"
#include "transfer/socket.h"
#include "transfer/wire.h"

namespace mk::transfer {

struct Greeting {
  Hello hello;
  std::string name;
};

void send_greeting(Socket& socket, const Endpoint& own, const Limit& limit);

// Throws Failure if what comes is no greeting. The version is left to the caller to check, who may
// want to answer first.
Greeting receive_greeting(Socket& socket, const Limit& limit);

}  // namespace mk::transfer
