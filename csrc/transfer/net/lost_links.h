// LostLinks: which connections to an engine were lost while it was writing their data. That data
// may still land until the engine has ended them, because of a later connection of their link or
// because another connection says so (Op::kFence).
//
//   const LostLinksRef lost = table.of(instance);   // shared by all that have opened that engine
//   lost->add(link);
//   if (lost->any()) ...                            // nothing new may be written
//
// Layer: transfer. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer/wire/wire.h"

namespace mk::transfer {

class LostLinks {
 public:
  void add(const Link& link) noexcept;
  void recover(const Link& link);  // it has reconnected
  bool any() const { return any_; }
  std::vector<Link> all() const;
  void forget(const std::vector<Link>& ended);  // as the engine has confirmed

 private:
  std::atomic<bool> any_{false};
  mutable std::mutex mutex_;
  std::vector<Link> links_;
};
using LostLinksRef = std::shared_ptr<LostLinks>;

// By engine: those in use, and at most kMaxLeft others; beyond that, the one met the longest ago is
// forgotten.
class LostLinksTable {
 public:
  static constexpr size_t kMaxLeft = 1024;

  LostLinksRef of(uint64_t instance);

 private:
  struct Entry {
    LostLinksRef links;
    uint64_t met_at;  // by the clock of meetings
    bool is_left() const { return links.use_count() == 1; }
  };
  void forget_some();

  std::mutex mutex_;
  std::map<uint64_t, Entry> entries_;
  uint64_t num_met_ = 0;
};

}  // namespace mk::transfer
