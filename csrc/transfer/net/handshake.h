// The handshake that begins a connection, on either side: Hello, the proof that both know the
// secret, Welcome. docs/internals/wire.md has the bytes.
//
//   const Greeting peer = introduce(socket, own, link, to, limit);         // the initiator's
//
//   Reception reception(socket, own, limit);                               // the target's
//   const Greeting& peer = reception.meet();   // on Rejected: reception.reject(why)
//   reception.welcome();
//
// Layer: transfer.
#pragma once

#include "transfer/base/error.h"
#include "transfer/net/address.h"
#include "transfer/net/endpoint.h"
#include "transfer/net/greeting.h"
#include "transfer/net/socket.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

// The target has ended the connection before its Welcome: its places may be taken by strangers
// who come without end. Another attempt may find one.
struct NotAnswered : LinkDown {
  using LinkDown::LinkDown;
};

// Starts TLS if we use it: `to` is what we were given to connect to. Returns once the peer has
// proved what it must and has welcomed us. Throws Failure, also NotAnswered. Sends nothing to a
// process of a user of this machine that we do not admit.
Greeting introduce(Socket& socket, const Endpoint& own, const Link& link, const HostPort& to,
                   const Limit& limit);

class Reception {
 public:
  Reception(Socket& socket, const Endpoint& own, const Limit& limit)
      : socket_(socket), own_(own), limit_(limit) {}

  // Receives the greeting, and verifies the proof and that the peer has meant this engine. Throws
  // Rejected, or another Failure if there is no peer to tell.
  const Greeting& meet();

  void welcome();                           // with our proof: from here on the peer sends requests
  void reject(RejectReason reject_reason);  // tells the peer why not

 private:
  void start_tls();
  void say(RejectReason reject_reason, const Bytes32& proof);

  Socket& socket_;
  const Endpoint& own_;
  const Limit& limit_;
  Greeting mine_;
  Greeting theirs_;
};

}  // namespace mk::transfer
