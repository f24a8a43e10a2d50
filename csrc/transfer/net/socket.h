// Socket: a non-blocking connection: TCP, TLS over it, or within a machine. Every call ends at a
// Limit.
//
//   Socket socket = Socket::connect(resolve(where), limit);
//   socket.start_tls(context, host, limit);               // from here on encrypted
//   socket.send(parts.data(), parts.size(), limit);       // gathers
//   socket.receive(parts.data(), parts.size(), limit);    // scatters
//
//   socket.send_lent(parts.data(), parts.size(), 1, limit);   // all but the first may be lent
//   socket.settle(socket.num_lent(), limit);                  // now their memory may change
//
// Layer: transfer. Errors are LinkDown ("connection refused", "connection closed by peer", ...), at
// the limit Ended, and Inaccessible: of memory that is not there any more. Then all that was to be
// received has been, and is lost.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/fd.h"
#include "transfer/base/limit.h"
#include "transfer/net/address.h"
#include "transfer/net/frame_macs.h"
#include "transfer/net/tls.h"
#include "transfer/net/zero_copy.h"

namespace mk::transfer {

// Ends the connection or the listening, and closes. A forked child may have a copy of the
// descriptor: close(2) alone would keep both open as long as it lives.
void shut_down(Fd& fd) noexcept;

class Socket {
 public:
  Socket() = default;
  explicit Socket(Fd fd);  // a connected stream socket; makes it non-blocking
  Socket(Socket&&) = default;
  Socket& operator=(Socket&&) = default;
  ~Socket() { close(); }

  // Tries the addresses in turn; again, until the limit, while this machine has no port for it.
  static Socket connect(const std::vector<SocketAddress>& addresses, const Limit& limit);

  // Performs the handshake; see TlsStream. The context must outlive the socket.
  void start_tls(const TlsContext& context, const std::string& host, const Limit& limit);
  bool is_tls() const { return tls_ != nullptr; }
  Bytes32 binding() const { return tls_ ? tls_->binding() : Bytes32{}; }

  // Transfer every byte of the parts, and use them up: the iovecs are changed.
  void send(iovec* parts, size_t num_parts, const Limit& limit);
  void receive(iovec* parts, size_t num_parts, const Limit& limit);

  void send(const void* data, size_t num_bytes, const Limit& limit);
  void receive(void* data, size_t num_bytes, const Limit& limit);

  // As send(), but the kernel may keep the memory of the parts from `first_lent` on, rather than
  // copy it, if there is much of it and it leaves for another machine: it must not change until it
  // is settled, up to num_lent() after the send. Throws Ended as well. Whichever of these throws,
  // and close(): what has not left by then never does, and the memory may change.
  void send_lent(iovec* parts, size_t num_parts, size_t first_lent, const Limit& limit);
  uint64_t num_lent() const { return zero_copy_ ? zero_copy_->num_sent() : 0; }
  void settle(uint64_t num_lent, const Limit& limit);
  bool lends(uint64_t num_bytes, size_t num_parts) const;  // whether it would lend such parts

  // Receives at least one byte, and at most `num_bytes`.
  size_t receive_some(void* data, size_t num_bytes, const Limit& limit);
  void discard(uint64_t num_bytes, const Limit& limit);

  // How long a receive polls for input before it sleeps.
  void spin_for(std::chrono::microseconds time) { spin_ = time; }

  bool is_within_machine() const;
  std::optional<uid_t> peer_user() const;  // within a machine: as it connected, or began to listen
  // Within a machine, to a process of this user: it may do as much to us without a connection.
  bool is_own() const { return is_within_machine() && peer_process() != 0; }
  std::string peer_address() const;  // see numeric_name

  // Without TLS, if its sides authenticate each frame: by what. Null: they do not.
  void set_frame_macs(std::unique_ptr<FrameMacs> macs) { frame_macs_ = std::move(macs); }
  FrameMacs* frame_macs() const { return frame_macs_.get(); }

  // Within a machine: a descriptor, and a byte that goes with it.
  void send_fd(const Fd& fd, const Limit& limit);
  Fd receive_fd(const Limit& limit);  // throws Failure if there is none

  // The process at the other end of a connection within the machine, if it is of the same user
  // and not hidden in another namespace; otherwise 0.
  pid_t peer_process() const;
  // The next byte of input, which stays there.
  unsigned char peek(const Limit& limit);

  // Announces the end, and reads what still arrives until the peer closes: otherwise a peer that is
  // sending could lose our last message.
  void linger(const Limit& limit) noexcept;

  // Whether it is connected and idle: the peer has neither closed it nor sent anything.
  bool at_rest() const;
  // Whether the other end is closed, even if unread input remains.
  bool peer_has_left() const;
  uint64_t num_bytes_here() const;      // received by the kernel, but not by a call
  uint64_t num_bytes_room() const;      // what a send surely takes at once, with nothing unsent
  void wake_from(uint64_t num_bytes);   // for poll(2): readable with fewer only if no more fit
  int fd() const { return fd_.get(); }  // for poll(2)
  void close() noexcept;

 private:
  bool is_silent() const;  // nothing has come, not even its end
  void wait_for_bytes(const Limit& limit) const;
  void receive_raw(iovec* parts, size_t num_parts, int flags, const Limit& limit);
  void drop(const iovec* parts, size_t num_parts, const Limit& limit);
  void send_raw(iovec* parts, size_t num_parts, int flags, const Limit& limit);
  void take_back() noexcept;

  Fd fd_;
  std::unique_ptr<TlsStream> tls_;
  std::unique_ptr<FrameMacs> frame_macs_;
  bool may_lend_ = false;                // to another machine, in plain
  std::unique_ptr<ZeroCopy> zero_copy_;  // while something is lent, or could be
  std::chrono::microseconds spin_{0};
};

std::optional<uid_t> peer_user(const Fd& fd);  // as Socket's

// A socket bound to the first of the addresses that allows it. `reuse`: even while connections of
// an earlier owner of the port are still ending. Throws SystemError.
Fd bind_socket(const std::string& name, const std::vector<SocketAddress>& addresses, bool reuse);

SocketAddress bound_address(const Fd& fd);
uint16_t bound_port(const Fd& fd);

}  // namespace mk::transfer
