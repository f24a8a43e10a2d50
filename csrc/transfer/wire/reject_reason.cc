#include "transfer/wire/reject_reason.h"

namespace mk::transfer {
namespace {

constexpr size_t kMaxReasons = 64;  // some contain numbers from a stranger

struct Words {
  const char* at_target;
  const char* at_initiator;
  FailureKind kind;
};

Words words(RejectReason why) {
  switch (why) {
    case RejectReason::kNone:
      break;
    case RejectReason::kNoSecret:
      return {"the peer has no secret", "the peer has a secret, this engine has none",
              FailureKind::kDenied};
    case RejectReason::kUnwantedSecret:
      return {"the peer has a secret, this engine has none", "the peer has no secret",
              FailureKind::kDenied};
    case RejectReason::kOtherSecret:
      return {"the peer's secret is another", "the peer's secret is another", FailureKind::kDenied};
    case RejectReason::kNoTls:
      return {"the peer speaks no TLS", "the peer speaks TLS only", FailureKind::kDenied};
    case RejectReason::kOldEpoch:
      return {"the peer has connected anew since", "the peer has met a later connection of ours",
              FailureKind::kDisconnected};
    case RejectReason::kStillBusy:
      return {"the peer's connection before has not ended in time",
              "the peer has not ended the connection before in time", FailureKind::kBusy};
    case RejectReason::kFull:
      return {"too many connections", "the peer has too many connections", FailureKind::kBusy};
    case RejectReason::kUnwantedTls:
      return {"the peer speaks TLS only, this engine does not", "the peer speaks no TLS",
              FailureKind::kDenied};
    case RejectReason::kOtherAddress:
      return {"the peer has dialled an address that is not this engine's (reached_at)",
              "the engine that answers is not of this address, unless its reached_at says so",
              FailureKind::kDenied};
  }
  return {"welcome", "welcome", FailureKind::kOther};
}

}  // namespace

ErrorReason reason_at_target(RejectReason why) { return {words(why).at_target, words(why).kind}; }
ErrorReason reason_at_initiator(RejectReason why) {
  return {words(why).at_initiator, words(why).kind};
}

const char* process_of_another() {
  return "a process of another user of this machine (local_users)";
}

const char* listener_of_another() {
  return "the listener on this machine belongs to another user (local_users)";
}

void Rejections::count(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  const bool is_known = table_.count(reason) != 0;
  ++table_[is_known || table_.size() < kMaxReasons ? reason : "another cause"];
}

Rejections::Table Rejections::table() const {
  const std::lock_guard lock(mutex_);
  return table_;
}

}  // namespace mk::transfer
