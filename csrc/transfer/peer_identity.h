// PeerIdentity: what all connections to a peer have in common: which engine they must lead to, and
// which of them were lost while the peer was writing what they had brought.
//
// Layer: transfer. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "transfer/wire.h"

namespace mk::transfer {

class PeerIdentity {
 public:
  explicit PeerIdentity(uint64_t expected) : expected_(expected) {}  // 0: whoever answers first

  // Throws Failure if it is another engine.
  void check(uint64_t instance);

  // A connection is lost: what it has sent may still land, until the peer has ended it, because of
  // a later one of its link or because another connection says so (Op::kFence).
  void lose(const Link& link) noexcept;
  void recover(const Link& link);
  // Until the peer has confirmed that they are ended, nobody may write anything new.
  bool has_lost() const { return has_lost_; }
  std::vector<Link> lost() const;
  void forget(const std::vector<Link>& ended);

 private:
  const uint64_t expected_;
  std::atomic<uint64_t> instance_{0};  // 0 before the first connection
  std::atomic<bool> has_lost_{false};
  mutable std::mutex mutex_;
  std::vector<Link> lost_;
};

}  // namespace mk::transfer
