// Socket: a non-blocking stream, TCP or within a machine, whose every call ends at a Limit.
//
//   Socket socket = Socket::connect(resolve(where), limit);
//   socket.send(parts.data(), parts.size(), limit);       // gathers
//   socket.receive(parts.data(), parts.size(), limit);    // scatters
//
// Layer: transfer. Errors are LinkDown ("connection refused", "connection closed by peer", ...)
// and, at the limit, Ended.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/fd.h"
#include "transfer/address.h"
#include "transfer/limit.h"

namespace mk::transfer {

// Ends the connection or the listening, and closes. A forked child may have a copy of the
// descriptor: close(2) alone would leave both as they are for as long as it lives.
void shut_down(Fd& fd) noexcept;

class Socket {
 public:
  Socket() = default;
  explicit Socket(Fd fd);  // a connected socket; makes it non-blocking
  Socket(Socket&&) = default;
  Socket& operator=(Socket&&) = default;
  ~Socket() { close(); }

  // Tries the addresses in turn.
  static Socket connect(const std::vector<SocketAddress>& addresses, const Limit& limit);

  // Move every byte of the parts, which they use up: the iovecs are changed.
  void send(iovec* parts, size_t num_parts, const Limit& limit);
  void receive(iovec* parts, size_t num_parts, const Limit& limit);

  void send(const void* data, size_t num_bytes, const Limit& limit);
  void receive(void* data, size_t num_bytes, const Limit& limit);
  void discard(uint64_t num_bytes, const Limit& limit);

  // Within a machine: a descriptor, and a byte that goes with it.
  void send_fd(const Fd& fd, const Limit& limit);
  Fd receive_fd(const Limit& limit);  // throws Failure if there is none

  // The process at the other end of a connection within the machine, if it is of the same user
  // and not hidden in another namespace; otherwise 0.
  pid_t peer_process() const;

  // Whether it is connected and at rest: the peer has neither closed it nor sent anything.
  bool at_rest() const;
  void close() noexcept { shut_down(fd_); }

 private:
  Fd fd_;
};

// A socket bound to the first of the addresses that allows it. `reuse`: also when connections of
// an earlier owner of the port are still ending. Throws SystemError.
Fd bind_socket(const std::string& name, const std::vector<SocketAddress>& addresses, bool reuse);

SocketAddress bound_address(const Fd& fd);
uint16_t bound_port(const Fd& fd);

}  // namespace mk::transfer
