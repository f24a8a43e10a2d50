#include "transfer/greeting.h"

#include <algorithm>
#include <iterator>

namespace mk::transfer {

void send_greeting(Socket& socket, const Endpoint& own, const Limit& limit) {
  Hello hello{{}, kWireVersion, static_cast<uint32_t>(own.name.size()), own.instance};
  std::copy(std::begin(kMagic), std::end(kMagic), hello.magic);
  iovec parts[] = {{&hello, sizeof(hello)}, {const_cast<char*>(own.name.data()), own.name.size()}};
  socket.send(parts, 2, limit);
}

Greeting receive_greeting(Socket& socket, const Limit& limit) {
  Greeting greeting;
  socket.receive(&greeting.hello, sizeof(greeting.hello), limit);
  check_magic(greeting.hello);
  greeting.name.resize(greeting.hello.name_bytes);
  socket.receive(greeting.name.data(), greeting.name.size(), limit);
  check_name(greeting.name);
  return greeting;
}

}  // namespace mk::transfer
