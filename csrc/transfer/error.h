// Errors of transfers. Inside the engine an error is its cause in one phrase; a Ticket adds the
// peer and how far it got.
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.h"

namespace mk::transfer {

// The transfer ends and, over TCP, its connection with it: the stream may be mid-frame.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The connection is gone: a retry on another one may succeed.
struct LinkDown : Failure {
  using Failure::Failure;
};

// A Limit was reached: the deadline passed, or someone interrupted.
struct Ended : Failure {
  using Failure::Failure;
};

// A GPU's driver refused, or the GPU failed.
struct GpuFailure : Failure {
  using Failure::Failure;
};

// One side refused before any byte of the batch moved; the connection stays usable.
struct Refused : Failure {
  using Failure::Failure;
};

// Callers see this. Python: mooncake_kernels.errors.TransferError (host/transfer.cc translates).
struct TransferError : std::runtime_error {
  TransferError(const std::string& peer, const std::string& cause, uint64_t num_bytes_done = 0,
                uint64_t num_bytes_total = 0, bool timed_out = false,
                bool only_notification_missing = false)
      : std::runtime_error(concat("transfer with ", peer, ": ", cause)),
        peer(peer),
        cause(cause),
        num_bytes_done(num_bytes_done),
        num_bytes_total(num_bytes_total),
        timed_out(timed_out),
        only_notification_missing(only_notification_missing) {}

  std::string peer;
  std::string cause;
  uint64_t num_bytes_done;  // confirmed by the other side
  uint64_t num_bytes_total;
  bool timed_out;                  // its deadline passed
  bool only_notification_missing;  // all bytes are confirmed
};

}  // namespace mk::transfer
