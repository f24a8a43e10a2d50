#include "transfer/net/greeting.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "transfer/base/random.h"

namespace mk::transfer {

std::string Greeting::bytes() const {
  std::string bytes(reinterpret_cast<const char*>(&hello), sizeof(hello));
  bytes += name;
  bytes.append(reinterpret_cast<const char*>(&tail), sizeof(tail));
  bytes += dialled;
  bytes += reached;
  return bytes;
}

void Greeting::set_addresses(const std::string& to, const std::string& leads_to) {
  dialled = to;
  reached = leads_to;
  tail.dialled_bytes = static_cast<uint16_t>(dialled.size());
  tail.reached_bytes = static_cast<uint16_t>(reached.size());
}

Greeting make_greeting(const Endpoint& own, const Link& link) {
  const uint32_t flags = (own.credentials.secret ? kFlagSecret : 0) |  //
                         (own.credentials.tls ? kFlagTls : 0);
  Greeting greeting{{{}, kWireVersion, static_cast<uint32_t>(own.name.size()), own.instance},
                    own.name,
                    {flags, 0, 0, link, random_value<Bytes32>()}};
  std::copy(std::begin(kMagic), std::end(kMagic), greeting.hello.magic);
  return greeting;
}

void send_greeting(Socket& socket, const Greeting& greeting, const Limit& limit) {
  const std::string bytes = greeting.bytes();
  socket.send(bytes.data(), bytes.size(), limit);
}

Greeting receive_greeting(Socket& socket, const Limit& limit) {
  Greeting greeting;
  socket.receive(&greeting.hello, sizeof(greeting.hello), limit);
  check_magic(greeting.hello);
  greeting.name.resize(greeting.hello.name_bytes);
  socket.receive(greeting.name.data(), greeting.name.size(), limit);
  check_name(greeting.name);
  if (greeting.hello.version == kWireVersion) {
    socket.receive(&greeting.tail, sizeof(greeting.tail), limit);
    check_tail(greeting.tail);
    for (auto [text, num_bytes] : {std::pair(&greeting.dialled, greeting.tail.dialled_bytes),
                                   std::pair(&greeting.reached, greeting.tail.reached_bytes)}) {
      text->resize(num_bytes);
      socket.receive(text->data(), text->size(), limit);
      check_name(*text);
    }
  }
  return greeting;
}

}  // namespace mk::transfer
