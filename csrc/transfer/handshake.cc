#include "transfer/handshake.h"

#include "transfer/error.h"
#include "transfer/verdict.h"

namespace mk::transfer {
namespace {

constexpr unsigned char kTlsHandshake = 0x16;  // what TLS begins with; a Hello does with an M

void expect_same_secret(bool is_same) {
  if (!is_same) throw Failure(told(Verdict::kOtherSecret));
}

}  // namespace

Greeting introduce(Socket& socket, const Endpoint& own, const Link& link, const std::string& host,
                   const Limit& limit) {
  const Credentials& credentials = own.credentials;
  if (credentials.tls) socket.start_tls(*credentials.tls, host, limit);
  const Greeting mine = make_greeting(own, link);
  send_greeting(socket, mine, limit);
  const Greeting peer = receive_greeting(socket, limit);
  check_version(peer.hello);
  const bool proves = credentials.secret && peer.has(kFlagSecret);
  const auto prove = [&](Side side) {
    return credentials.secret->prove(side, socket.binding(), mine.bytes(), peer.bytes());
  };
  if (proves) {
    const Bytes32 proof = prove(Side::kInitiator);
    socket.send(proof.data(), proof.size(), limit);
  }
  Welcome welcome;
  socket.receive(&welcome, sizeof(welcome), limit);
  check_welcome(welcome);
  if (welcome.verdict != Verdict::kWelcome) throw Failure(told(welcome.verdict));
  // Whoever lets us in although we do not agree is no engine, or between us and one.
  if (credentials.secret && !proves) throw Failure(told(Verdict::kUnwantedSecret));
  if (peer.has(kFlagSecret) && !proves) throw Failure(told(Verdict::kNoSecret));
  if (proves) expect_same_secret(equal(welcome.proof, prove(Side::kTarget)));
  return peer;
}

const Greeting& Reception::meet() {
  const Credentials& credentials = own_.credentials;
  if (credentials.tls && socket_.peek(limit_) == kTlsHandshake) {
    socket_.start_tls(*credentials.tls, "", limit_);
  }
  theirs_ = receive_greeting(socket_, limit_);
  mine_ = make_greeting(own_, {});
  send_greeting(socket_, mine_, limit_);  // also to another version, so that it can tell
  check_version(theirs_.hello);
  check_terms();
  if (!credentials.secret) return theirs_;
  Bytes32 proof;
  socket_.receive(proof.data(), proof.size(), limit_);
  const Bytes32 expected = credentials.secret->prove(Side::kInitiator, socket_.binding(),
                                                     theirs_.bytes(), mine_.bytes());
  if (!equal(proof, expected)) throw Rejected(Verdict::kOtherSecret);
  return theirs_;
}

void Reception::check_terms() const {
  if (own_.credentials.tls && !socket_.is_tls()) throw Rejected(Verdict::kNoTls);
  const bool has_secret = own_.credentials.secret != nullptr;
  if (has_secret && !theirs_.has(kFlagSecret)) throw Rejected(Verdict::kNoSecret);
  if (!has_secret && theirs_.has(kFlagSecret)) throw Rejected(Verdict::kUnwantedSecret);
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
