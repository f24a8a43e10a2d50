// Errors of transfers. Inside the engine an error is its ErrorReason; a Ticket adds the peer and
// how far it got.
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

// What a program may decide by; docs/transfer/transfer.md says what each means for it. A text may
// not: it is for people, and may be a peer's. The numbers are those of FailureKind in
// mooncake_kernels/errors.py.
enum class FailureKind {
  kOther = 0,          // unforeseen: of an error that arose outside this layer
  kTimedOut = 1,       // its deadline passed
  kCancelled = 2,      // by its caller
  kChecksum = 3,       // ranges differ that were moved
  kGone = 4,           // no one is at the peer's address or name, or another engine is
  kDisconnected = 5,   // the connection broke, and what it carried was not to be retried any more
  kUnreachable = 6,    // the network does not lead to the peer
  kBusy = 7,           // the peer has no room at the moment
  kExhausted = 8,      // of descriptors, threads, memory, local ports, or disk space
  kRefused = 9,        // the peer does not allow that: not registered, or without that right
  kDenied = 10,        // by the secret, TLS, or another user's rights
  kIncompatible = 11,  // the sides have no protocol, version or device in common
  kInaccessible = 12,  // memory that was registered, or of a file, is no longer there
  kDevice = 13,        // a GPU, NIC or disk failed
  kClosed = 14,        // this side closed the engine, peer or region meanwhile
};

FailureKind kind_of_errno(int error_number);

// Why something failed, in one phrase; empty: it did not. The kind has no default: each failure has
// one that was chosen.
struct ErrorReason {
  ErrorReason() = default;
  ErrorReason(std::string text, FailureKind kind) : text(std::move(text)), kind(kind) {}

  bool empty() const { return text.empty(); }

  std::string text;
  FailureKind kind = FailureKind::kOther;
};

// The words of the system for an errno, after `what`.
ErrorReason reason_of_errno(int error_number, const std::string& what = "");

// The transfer ends and, over TCP, its connection with it: the stream may be mid-frame.
struct Failure : std::runtime_error {
  explicit Failure(const ErrorReason& reason)
      : std::runtime_error(reason.text), kind(reason.kind) {}
  Failure(const std::string& text, FailureKind kind) : Failure(ErrorReason(text, kind)) {}

  ErrorReason reason() const { return {what(), kind}; }

  FailureKind kind;
};

// Of any error, also one that arose outside this layer.
ErrorReason reason_of(const std::exception& error);

// What a peer may have decided: its failure kinds that describe itself. Its own limits and its own
// closing are not ours.
FailureKind kind_of_peer(FailureKind its);

// The connection is gone: a retry on another one may succeed.
struct LinkDown : Failure {
  explicit LinkDown(const ErrorReason& reason) : Failure(reason) {}
  explicit LinkDown(const std::string& text) : Failure(text, FailureKind::kDisconnected) {}
};

// A Limit was reached: the deadline passed, or someone interrupted.
struct Ended : Failure {
  using Failure::Failure;
};

// A GPU's driver refused, or the GPU failed.
struct GpuFailure : Failure {
  explicit GpuFailure(const std::string& text) : Failure(text, FailureKind::kDevice) {}
};

// One side refused before any byte of the batch moved; the connection stays usable.
struct Refused : Failure {
  explicit Refused(const ErrorReason& reason) : Failure(reason) {}
  explicit Refused(const std::string& text) : Failure(text, FailureKind::kRefused) {}
};

// Memory of this process could not be accessed. Of what was to be sent, `num_bytes_moved` bytes
// have left; what was to be received has been, and is lost: then the connection stays usable.
struct Inaccessible : Failure {
  explicit Inaccessible(const std::string& why, uint64_t num_bytes_moved = 0)
      : Inaccessible("", why, num_bytes_moved) {}
  // `whose`: "local ", "the peer's ".
  Inaccessible(const std::string& whose, const std::string& why, uint64_t num_bytes_moved = 0)
      : Failure(whose + "memory is not accessible: " + why, FailureKind::kInaccessible),
        num_bytes_moved(num_bytes_moved) {}

  ErrorReason of(const char* whose) const { return {std::string(whose) + what(), kind}; }

  uint64_t num_bytes_moved;
};

// Callers see this. Python: mooncake_kernels.errors.TransferError (host/transfer.cc translates).
struct TransferError : std::runtime_error {
  TransferError(const std::string& peer, const ErrorReason& reason, uint64_t num_bytes_done = 0,
                uint64_t num_bytes_total = 0, bool only_notification_missing = false,
                std::vector<bool> delivered = {})
      : std::runtime_error(concat("transfer with ", peer, ": ", reason.text)),
        peer(peer),
        reason(reason),
        num_bytes_done(num_bytes_done),
        num_bytes_total(num_bytes_total),
        only_notification_missing(only_notification_missing),
        delivered(std::move(delivered)) {}

  std::string peer;
  ErrorReason reason;
  uint64_t num_bytes_done;  // confirmed by the other side
  uint64_t num_bytes_total;
  bool only_notification_missing;  // all bytes are confirmed
  std::vector<bool> delivered;     // see request/delivered.h; empty: there are no descriptors
};

}  // namespace mk::transfer
