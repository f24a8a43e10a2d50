// Errors of transfers. Inside the engine an error is its Cause; a Ticket adds the peer and how far
// it got.
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"

namespace mk::transfer {

// What may be decided by. A text may not: it is for people, and may be a peer's. The numbers are
// those of FailureKind in mooncake_kernels/errors.py.
enum class FailureKind {
  kOther = 0,
  kTimedOut = 1,   // its deadline passed
  kCancelled = 2,  // by its caller
  kChecksum = 3,   // ranges differ that were moved
  kGone = 4,       // nobody listens at the peer's address, or another engine does
};

// Why something failed, in one phrase; empty: it did not.
struct Cause {
  Cause() = default;
  Cause(std::string text, FailureKind kind = FailureKind::kOther)
      : text(std::move(text)), kind(kind) {}
  Cause(const char* text, FailureKind kind = FailureKind::kOther) : text(text), kind(kind) {}

  bool empty() const { return text.empty(); }

  std::string text;
  FailureKind kind = FailureKind::kOther;
};

// The transfer ends and, over TCP, its connection with it: the stream may be mid-frame.
struct Failure : std::runtime_error {
  explicit Failure(const Cause& cause) : std::runtime_error(cause.text), kind(cause.kind) {}

  Cause cause() const { return {what(), kind}; }

  FailureKind kind;
};

// Of any error, also one that arose outside this layer.
inline Cause cause_of(const std::exception& error) {
  const auto* const failure = dynamic_cast<const Failure*>(&error);
  return failure ? failure->cause() : Cause(error.what());
}

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
  TransferError(const std::string& peer, const Cause& cause, uint64_t num_bytes_done = 0,
                uint64_t num_bytes_total = 0, bool only_notification_missing = false,
                std::vector<bool> delivered = {})
      : std::runtime_error(concat("transfer with ", peer, ": ", cause.text)),
        peer(peer),
        cause(cause),
        num_bytes_done(num_bytes_done),
        num_bytes_total(num_bytes_total),
        only_notification_missing(only_notification_missing),
        delivered(std::move(delivered)) {}

  std::string peer;
  Cause cause;
  uint64_t num_bytes_done;  // confirmed by the other side
  uint64_t num_bytes_total;
  bool only_notification_missing;  // all bytes are confirmed
  std::vector<bool> delivered;     // see request/delivered.h; empty: there are no descriptors
};

}  // namespace mk::transfer
