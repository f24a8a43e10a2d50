// Why a peer was rejected before its first request: in words, for either side, and how often.
//
//   throw Rejected(RejectReason::kOtherSecret);                  // at the target, which tells the
//   initiator throw Failure(reason_at_initiator(welcome.reject_reason));   // at the initiator
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "transfer/base/error.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

ErrorReason reason_at_target(RejectReason why);     // the target's finding about the initiator
ErrorReason reason_at_initiator(RejectReason why);  // its meaning for the initiator

// A process on this machine: the target's finding about who connects, and the reverse.
const char* process_of_another();
const char* listener_of_another();

// A target rejects a peer.
struct Rejected : Failure {
  explicit Rejected(RejectReason reject_reason)
      : Failure(reason_at_target(reject_reason)), reject_reason(reject_reason) {}
  RejectReason reject_reason;
};

// How many connections an engine has rejected, by reason. Thread-safe.
class Rejections {
 public:
  using Table = std::map<std::string, uint64_t>;

  void count(const std::string& reason);
  Table table() const;

 private:
  mutable std::mutex mutex_;
  Table table_;
};

}  // namespace mk::transfer
