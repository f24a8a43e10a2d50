#include "transfer/net/handshake.h"

#include <memory>
#include <optional>
#include <string>

#include "transfer/base/error.h"
#include "transfer/net/frame_macs.h"
#include "transfer/wire/reject_reason.h"

namespace mk::transfer {
namespace {

constexpr unsigned char kTlsHandshake = 0x16;  // the first byte of TLS; a Hello starts with M

// What either side has against the two Hellos: neither accepts less than it requires.
RejectReason judge(const Greeting& initiators, const Greeting& targets, const Socket& socket) {
  if (targets.has(kFlagSecret) && !initiators.has(kFlagSecret)) return RejectReason::kNoSecret;
  if (initiators.has(kFlagSecret) && !targets.has(kFlagSecret))
    return RejectReason::kUnwantedSecret;
  if (socket.is_tls() || socket.is_own()) return RejectReason::kNone;
  if (targets.has(kFlagTls)) return RejectReason::kNoTls;
  return initiators.has(kFlagTls) ? RejectReason::kUnwantedTls : RejectReason::kNone;
}

// From here on, if only the secret guards the connection.
void start_frame_macs(Socket& socket, const Credentials& credentials, Side own,
                      const Greeting& initiators, const Greeting& targets) {
  if (!credentials.secret || credentials.tls || socket.is_own()) return;
  const auto key = [&](Side side) {
    return credentials.secret->frame_key(side, initiators.bytes(), targets.bytes());
  };
  const Side other = own == Side::kInitiator ? Side::kTarget : Side::kInitiator;
  socket.set_frame_macs(std::make_unique<FrameMacs>(key(own), key(other)));
}

void expect_welcome(RejectReason reject_reason) {
  if (reject_reason != RejectReason::kNone) throw Failure(reason_at_initiator(reject_reason));
}

}  // namespace

Greeting introduce(Socket& socket, const Endpoint& own, const Link& link, const HostPort& to,
                   const Limit& limit) try {
  const Credentials& credentials = own.credentials;
  const std::optional<uid_t> user = socket.peer_user();
  if (user && !credentials.local_users.admit(*user)) {
    throw Failure(listener_of_another(), FailureKind::kDenied);
  }
  Greeting mine = make_greeting(own, link);
  mine.set_addresses(to.name(), socket.peer_address());
  bool is_answered = false;
  try {
    if (credentials.tls && !socket.is_own()) socket.start_tls(*credentials.tls, to.host, limit);
  } catch (const PlainAnswer&) {
    is_answered = true;
  }
  if (!is_answered) send_greeting(socket, mine, limit);
  const Greeting peer = receive_greeting(socket, limit);
  check_version(peer.hello);
  expect_welcome(judge(mine, peer, socket));
  if (is_answered) throw PlainAnswer();
  if (peer.hello.instance == own.instance && !own.addresses.include(mine.dialled, mine.reached)) {
    throw Failure("this engine itself answers, at an address that is not its own",
                  FailureKind::kDenied);
  }
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
  expect_welcome(welcome.reject_reason);
  if (credentials.secret && !equal(welcome.proof, prove(Side::kTarget))) {
    throw Failure(reason_at_initiator(RejectReason::kOtherSecret));
  }
  start_frame_macs(socket, credentials, Side::kInitiator, mine, peer);
  return peer;
} catch (const LinkDown& down) {
  throw NotAnswered(down.reason());
}

void Reception::start_tls() {
  if (own_.credentials.tls) return socket_.start_tls(*own_.credentials.tls, "", limit_);
  send_greeting(socket_, mine_, limit_);
  throw Rejected(RejectReason::kUnwantedTls);
}

const Greeting& Reception::meet() {
  const Credentials& credentials = own_.credentials;
  mine_ = make_greeting(own_, {});
  if (socket_.peek(limit_) == kTlsHandshake) start_tls();
  theirs_ = receive_greeting(socket_, limit_);
  send_greeting(socket_, mine_, limit_);  // even to another version, so that it can tell
  check_version(theirs_.hello);
  const RejectReason reject_reason = judge(theirs_, mine_, socket_);
  if (reject_reason != RejectReason::kNone) throw Rejected(reject_reason);
  if (!credentials.secret) return theirs_;
  Bytes32 proof;
  socket_.receive(proof.data(), proof.size(), limit_);
  const Bytes32 expected = credentials.secret->prove(Side::kInitiator, socket_.binding(),
                                                     theirs_.bytes(), mine_.bytes());
  if (!equal(proof, expected)) throw Rejected(RejectReason::kOtherSecret);
  // Somebody in between, who need not know the secret, may hand on what was meant for another.
  if (!socket_.is_own() && !own_.addresses.include(theirs_.dialled, theirs_.reached)) {
    throw Rejected(RejectReason::kOtherAddress);
  }
  return theirs_;
}

void Reception::welcome() {
  const auto& secret = own_.credentials.secret;
  say(RejectReason::kNone,
      secret ? secret->prove(Side::kTarget, socket_.binding(), theirs_.bytes(), mine_.bytes())
             : Bytes32{});
  start_frame_macs(socket_, own_.credentials, Side::kTarget, theirs_, mine_);
}

void Reception::reject(RejectReason reject_reason) { say(reject_reason, {}); }

void Reception::say(RejectReason reject_reason, const Bytes32& proof) {
  const Welcome welcome{reject_reason, 0, proof};
  socket_.send(&welcome, sizeof(welcome), limit_);
}

}  // namespace mk::transfer
