#include "transfer/wire/handshake.h"

#include "transfer/error.h"
#include "transfer/verdict.h"

namespace mk::transfer {
namespace {

constexpr unsigned char kTlsHandshake = 0x16;  // the first byte of TLS; a Hello starts with M

// The verdict of either side on the two Hellos: neither accepts less than it requires.
// `is_private`: TLS, or a connection within the machine.
Verdict judge(const Greeting& initiators, const Greeting& targets, bool is_private) {
  if (targets.has(kFlagTls) && !is_private) return Verdict::kNoTls;
  if (targets.has(kFlagSecret) && !initiators.has(kFlagSecret)) return Verdict::kNoSecret;
  if (initiators.has(kFlagSecret) && !targets.has(kFlagSecret)) return Verdict::kUnwantedSecret;
  return Verdict::kWelcome;
}

bool is_private(const Socket& socket) { return socket.is_tls() || socket.is_within_machine(); }

void expect_welcome(Verdict verdict) {
  if (verdict != Verdict::kWelcome) throw Failure(told(verdict));
}

}  // namespace

Greeting introduce(Socket& socket, const Endpoint& own, const Link& link, const std::string& host,
                   const Limit& limit) {
  const Credentials& credentials = own.credentials;
  if (credentials.tls && !socket.is_within_machine()) {
    socket.start_tls(*credentials.tls, host, limit);
  }
  const Greeting mine = make_greeting(own, link);
  send_greeting(socket, mine, limit);
  const Greeting peer = receive_greeting(socket, limit);
  check_version(peer.hello);
  expect_welcome(judge(mine, peer, is_private(socket)));
  const auto prove = [&](Side side) {
    return credentials.secret->prove(side, socket.binding(), mine.bytes(), peer.bytes());
  };
  if (credentials.secret) {
    const Bytes32 proof = prove(Side::kInitiator);
    socket.send(proof.data(), proof.size(), limit);
  }
  Welcome welcome;
  socket.receive(&welcome, sizeof(welcome), limit);
  check_welcome(welcome);
  expect_welcome(welcome.verdict);
  if (credentials.secret && !equal(welcome.proof, prove(Side::kTarget))) {
    throw Failure(told(Verdict::kOtherSecret));
  }
  return peer;
}

const Greeting& Reception::meet() {
  const Credentials& credentials = own_.credentials;
  if (credentials.tls && socket_.peek(limit_) == kTlsHandshake) {
    socket_.start_tls(*credentials.tls, "", limit_);
  }
  theirs_ = receive_greeting(socket_, limit_);
  mine_ = make_greeting(own_, {});
  send_greeting(socket_, mine_, limit_);  // even to another version, so that it can tell
  check_version(theirs_.hello);
  const Verdict verdict = judge(theirs_, mine_, is_private(socket_));
  if (verdict != Verdict::kWelcome) throw Rejected(verdict);
  if (!credentials.secret) return theirs_;
  Bytes32 proof;
  socket_.receive(proof.data(), proof.size(), limit_);
  const Bytes32 expected = credentials.secret->prove(Side::kInitiator, socket_.binding(),
                                                     theirs_.bytes(), mine_.bytes());
  if (!equal(proof, expected)) throw Rejected(Verdict::kOtherSecret);
  return theirs_;
}

void Reception::welcome() {
  const auto& secret = own_.credentials.secret;
  say(Verdict::kWelcome,
      secret ? secret->prove(Side::kTarget, socket_.binding(), theirs_.bytes(), mine_.bytes())
             : Bytes32{});
}

void Reception::reject(Verdict verdict) { say(verdict, {}); }

void Reception::say(Verdict verdict, const Bytes32& proof) {
  const Welcome welcome{verdict, 0, proof};
  socket_.send(&welcome, sizeof(welcome), limit_);
}

}  // namespace mk::transfer
