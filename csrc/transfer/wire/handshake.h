// The handshake that begins a connection, on either side: Hello, the proof that both know the
// secret, Welcome. docs/wire.md has the bytes.
//
//   const Greeting peer = introduce(socket, own, link, host, limit);       // the initiator's
//
//   Reception reception(socket, own, limit);                               // the target's
//   const Greeting& peer = reception.meet();   // on Rejected: reception.reject(verdict)
//   reception.welcome();
//
// Layer: transfer.
#pragma once

#include <string>

#include "transfer/endpoint.h"
#include "transfer/wire/greeting.h"
#include "transfer/wire/socket.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

// Starts TLS if we use it: `host` is what the socket is connected to. Returns once the peer has
// proved what it must and has welcomed us. Throws Failure.
Greeting introduce(Socket& socket, const Endpoint& own, const Link& link, const std::string& host,
                   const Limit& limit);

class Reception {
 public:
  Reception(Socket& socket, const Endpoint& own, const Limit& limit)
      : socket_(socket), own_(own), limit_(limit) {}

  // Receives the greeting, and verifies the proof. Throws Rejected, or another Failure if there is
  // no peer to tell.
  const Greeting& meet();

  void welcome();                // with our proof: from here on the peer sends requests
  void reject(Verdict verdict);  // tells the peer why not

 private:
  void say(Verdict verdict, const Bytes32& proof);

  Socket& socket_;
  const Endpoint& own_;
  const Limit& limit_;
  Greeting mine_;
  Greeting theirs_;
};

}  // namespace mk::transfer
