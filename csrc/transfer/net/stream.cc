#include "transfer/net/stream.h"

#include <poll.h>

#include <cerrno>

#include "transfer/base/error.h"

namespace mk::transfer {

void advance(iovec*& parts, size_t& num_parts, size_t num_bytes) {
  while (num_parts > 0 && num_bytes >= parts->iov_len) {
    num_bytes -= parts->iov_len;
    ++parts;
    --num_parts;
  }
  if (num_bytes > 0) {
    parts->iov_base = static_cast<char*>(parts->iov_base) + num_bytes;
    parts->iov_len -= num_bytes;
  }
}

void wait_readable(int fd, const Limit& limit) { wait_ready(fd, POLLIN, limit); }

void wait_writable(int fd, const Limit& limit) {
  const short ready = wait_ready(fd, POLLOUT | POLLRDHUP, limit);
  if (ready & POLLRDHUP && !(ready & POLLOUT)) throw LinkDown(closed_by_peer());
}

ErrorReason connection_reason(int error_number) {
  if (error_number == ECONNREFUSED) return {"connection refused", FailureKind::kGone};
  if (error_number == ECONNRESET || error_number == EPIPE) return closed_by_peer();
  return reason_of_errno(error_number);
}

ErrorReason closed_by_peer() { return {"connection closed by peer", FailureKind::kDisconnected}; }

}  // namespace mk::transfer
