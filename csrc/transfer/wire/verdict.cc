#include "transfer/wire/verdict.h"

namespace mk::transfer {
namespace {

constexpr size_t kMaxCauses = 64;  // some contain numbers from a stranger

struct Words {
  const char* found;
  const char* told;
  FailureKind kind;
};

Words words(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWelcome:
      break;
    case Verdict::kNoSecret:
      return {"the peer has no secret", "the peer has a secret, this engine has none",
              FailureKind::kDenied};
    case Verdict::kUnwantedSecret:
      return {"the peer has a secret, this engine has none", "the peer has no secret",
              FailureKind::kDenied};
    case Verdict::kOtherSecret:
      return {"the peer's secret is another", "the peer's secret is another", FailureKind::kDenied};
    case Verdict::kNoTls:
      return {"the peer speaks no TLS", "the peer speaks TLS only", FailureKind::kDenied};
    case Verdict::kOldEpoch:
      return {"the peer has connected anew since", "the peer has met a later connection of ours",
              FailureKind::kDisconnected};
    case Verdict::kStillBusy:
      return {"the peer's connection before has not ended in time",
              "the peer has not ended the connection before in time", FailureKind::kBusy};
    case Verdict::kFull:
      return {"too many connections", "the peer has too many connections", FailureKind::kBusy};
    case Verdict::kUnwantedTls:
      return {"the peer speaks TLS only, this engine does not", "the peer speaks no TLS",
              FailureKind::kDenied};
    case Verdict::kOtherAddress:
      return {"the peer has dialled an address that is not this engine's (reached_at)",
              "the engine that answers is not of this address, unless its reached_at says so",
              FailureKind::kDenied};
  }
  return {"welcome", "welcome", FailureKind::kOther};
}

}  // namespace

Cause found(Verdict verdict) { return {words(verdict).found, words(verdict).kind}; }
Cause told(Verdict verdict) { return {words(verdict).told, words(verdict).kind}; }

const char* process_of_another() {
  return "a process of another user of this machine (local_users)";
}

const char* listener_of_another() {
  return "the listener on this machine belongs to another user (local_users)";
}

void Rejections::count(const std::string& cause) {
  const std::lock_guard lock(mutex_);
  const bool is_known = table_.count(cause) != 0;
  ++table_[is_known || table_.size() < kMaxCauses ? cause : "another cause"];
}

Rejections::Table Rejections::table() const {
  const std::lock_guard lock(mutex_);
  return table_;
}

}  // namespace mk::transfer
