// Greeting: a Hello and all that belongs to it, the first message in either direction.
//
// Layer: transfer. handshake.h uses them.
#pragma once

#include <string>

#include "transfer/endpoint.h"
#include "transfer/wire/socket.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

struct Greeting {
  Hello hello{};
  std::string name;
  HelloTail tail{};  // zeros if the peer speaks another version

  bool has(uint32_t flag) const { return tail.flags & flag; }
  std::string bytes() const;  // in wire form
};

Greeting make_greeting(const Endpoint& own, const Link& link);

void send_greeting(Socket& socket, const Greeting& greeting, const Limit& limit);

// Throws Failure if it receives anything but a greeting. The caller must check the version, because
// it may want to answer first.
Greeting receive_greeting(Socket& socket, const Limit& limit);

}  // namespace mk::transfer
