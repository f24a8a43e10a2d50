// Greeting: a Hello and all that belongs to it, the first message in either direction.
//
// Layer: transfer. handshake.h uses them.
#pragma once

#include <string>

#include "transfer/net/endpoint.h"
#include "transfer/net/socket.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

struct Greeting {
  Hello hello{};
  std::string name;
  HelloTail tail{};       // zeros if the peer speaks another version
  std::string dialled{};  // the addresses
  std::string reached{};

  // Of an initiator: where its connection was to lead, and leads.
  void set_addresses(const std::string& to, const std::string& leads_to);

  bool has(uint32_t flag) const { return tail.flags & flag; }
  std::string bytes() const;  // in wire form
};

Greeting make_greeting(const Endpoint& own, const Link& link);

void send_greeting(Socket& socket, const Greeting& greeting, const Limit& limit);

// Throws Failure if it receives anything but a greeting. The caller must check the version, because
// it may want to answer first.
Greeting receive_greeting(Socket& socket, const Limit& limit);

}  // namespace mk::transfer
