// PeerIdentity: what all connections of a Peer share: which engine they must lead to, and which
// connections to it were lost.
//
// Layer: transfer. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "transfer/base/error.h"
#include "transfer/net/lost_links.h"

namespace mk::transfer {

// Why a peer is not opened that was expected to be a certain instance.
inline ErrorReason another_engine() { return {"another engine answers there", FailureKind::kGone}; }

class PeerIdentity {
 public:
  // `expected`: an instance; 0: whichever answers first, of any name.
  PeerIdentity(uint64_t expected, std::string name, std::shared_ptr<LostLinksTable> table)
      : expected_(expected), name_(std::move(name)), table_(std::move(table)) {}

  // Throws Failure if it is another engine. `name`: the one by which it introduces itself.
  void check(uint64_t instance, const std::string& name);

  // Null before the first check.
  LostLinks* lost() const { return lost_; }
  bool has_lost() const {
    const LostLinks* const lost = lost_;
    return lost && lost->any();
  }

 private:
  const uint64_t expected_;
  const std::string name_;
  const std::shared_ptr<LostLinksTable> table_;
  std::mutex mutex_;
  uint64_t instance_ = 0;
  LostLinksRef links_;
  std::atomic<LostLinks*> lost_{nullptr};  // these links
};

}  // namespace mk::transfer
