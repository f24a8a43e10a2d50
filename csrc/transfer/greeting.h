// Greeting: a Hello with all that belongs to it, the first words in either direction.
//
// Layer: transfer. What is made of them: handshake.h.
#pragma once

#include <string>

#include "transfer/endpoint.h"
#include "transfer/socket.h"
#include "transfer/wire.h"

namespace mk::transfer {

struct Greeting {
  Hello hello{};
  std::string name;
  HelloTail tail{};  // zeros if the peer speaks another version

  bool has(uint32_t flag) const { return tail.flags & flag; }
  std::string bytes() const;  // as they go over the wire
};

Greeting make_greeting(const Endpoint& own, const Link& link);

void send_greeting(Socket& socket, const Greeting& greeting, const Limit& limit);

// Throws Failure if what comes is no greeting. The version is left to the caller to check, who may
// want to answer first.
Greeting receive_greeting(Socket& socket, const Limit& limit);

}  // namespace mk::transfer
