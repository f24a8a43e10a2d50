// Why a peer was rejected before its first request: in words, for either side, and how often.
//
//   throw Rejected(Verdict::kOtherSecret);     // at the target, which tells the initiator
//   throw Failure(told(welcome.verdict));      // at the initiator
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

Cause found(Verdict verdict);  // the target's finding about the initiator
Cause told(Verdict verdict);   // its meaning for the initiator

// A process on this machine: the target's finding about who connects, and the reverse.
const char* process_of_another();
const char* listener_of_another();

// A target rejects a peer.
struct Rejected : Failure {
  explicit Rejected(Verdict verdict) : Failure(found(verdict)), verdict(verdict) {}
  Verdict verdict;
};

// How many connections an engine has rejected, by cause. Thread-safe.
class Rejections {
 public:
  using Table = std::map<std::string, uint64_t>;

  void count(const std::string& cause);
  Table table() const;

 private:
  mutable std::mutex mutex_;
  Table table_;
};

}  // namespace mk::transfer
