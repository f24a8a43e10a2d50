// Common code of Socket and TlsStream: stepping over iovecs, waiting, and the texts of errors.
//
// Layer: transfer.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <string>

#include "transfer/base/limit.h"

namespace mk::transfer {

// Skips `num_bytes` that were moved; with 0, empty parts.
void advance(iovec*& parts, size_t& num_parts, size_t num_bytes);

// They throw Ended at the limit. wait_writable throws LinkDown if there is no room and the peer has
// closed: on a connection kept open by a copy in its forked child, there will never be any.
void wait_readable(int fd, const Limit& limit);
void wait_writable(int fd, const Limit& limit);

ErrorReason connection_reason(int error_number);  // "connection refused", ...
ErrorReason closed_by_peer();

}  // namespace mk::transfer
