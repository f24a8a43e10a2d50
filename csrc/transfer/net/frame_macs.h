// FrameMacs: what shows that a frame is the peer's own, on a connection without TLS whose sides
// have proved to know the secret: an HMAC over the frame's number, its header and all that follows
// it but data. No one in between can add, change, repeat or leave out a frame. It hides nothing.
//
//   sign(socket.frame_macs(), header, {{table, table_bytes}});    // before it is sent
//   verify(socket.frame_macs(), header, {{table, table_bytes}});  // once received; throws Forged
//
// Layer: transfer. One thread at a time. docs/internals/wire.md says what each frame's MAC covers.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "transfer/base/error.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

struct Forged : Failure {
  Forged() : Failure("a frame that is not the peer's own", FailureKind::kDenied) {}
};

using Covered = std::initializer_list<iovec>;

class FrameMacs {
 public:
  FrameMacs(const Bytes32& sending, const Bytes32& receiving)
      : sending_{sending}, receiving_{receiving} {}

  // Of the next frame in that direction. `header`: what precedes the MAC in it.
  Bytes32 next_sent(const iovec& header, Covered covered) {
    return next(sending_, header, covered);
  }
  void check_received(const iovec& header, Covered covered, const Bytes32& mac);

 private:
  struct Direction {
    Bytes32 key;
    uint64_t num_frames = 0;
  };

  Bytes32 next(Direction& direction, const iovec& header, Covered covered);

  Direction sending_, receiving_;
  std::string input_;
};

// Both do nothing if `macs` is null. A Header is a BatchHeader or an Ack.
template <class Header>
void sign(FrameMacs* macs, Header& header, Covered covered) {
  if (macs) header.mac = macs->next_sent({&header, offsetof(Header, mac)}, covered);
}
template <class Header>
void verify(FrameMacs* macs, const Header& header, Covered covered) {
  const iovec part{const_cast<Header*>(&header), offsetof(Header, mac)};
  if (macs) macs->check_received(part, covered, header.mac);
}

}  // namespace mk::transfer
