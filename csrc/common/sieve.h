// Sieve: chooses which entry to evict first (SIEVE, Zhang et al., NSDI '24).
//
//   struct Connection : SieveEntry { bool try_close(); };
//   Sieve<Connection> sieve;
//   sieve.insert(connection);
//   connection.visited = true;                                 // used: one relaxed store
//   sieve.evict([](Connection& c) { return c.try_close(); });  // the first one that agrees
//
// New entries go to the front. A hand walks from the back to the front and wraps around; it clears
// the mark of visited entries and evicts unmarked ones. Unlike in LRU, a visit moves nothing, so it
// needs no lock. Not thread-safe except for `visited`; entries are not owned.
//
// Layer: common.
#pragma once

#include <atomic>
#include <cstddef>

namespace mk {

struct SieveEntry {
  std::atomic<bool> visited{false};
  SieveEntry* newer = nullptr;  // these two belong to the Sieve
  SieveEntry* older = nullptr;
};

template <class Entry>
class Sieve {
 public:
  size_t size() const { return size_; }

  void insert(Entry& entry) {
    entry.visited.store(false, std::memory_order_relaxed);
    entry.newer = nullptr;
    entry.older = newest_;
    (newest_ ? newest_->newer : oldest_) = &entry;
    newest_ = &entry;
    ++size_;
  }

  void remove(Entry& entry) {
    if (hand_ == &entry) hand_ = entry.newer;
    (entry.newer ? entry.newer->older : newest_) = entry.older;
    (entry.older ? entry.older->newer : oldest_) = entry.newer;
    --size_;
  }

  // Removes the first unmarked entry for which try_evict returns true. Null: there was none in two
  // rounds, of which the first cleared every mark.
  template <class TryEvict>
  Entry* evict(TryEvict try_evict) {
    for (size_t steps = 2 * size_; steps > 0; --steps) {
      if (!hand_) hand_ = oldest_;
      auto& entry = static_cast<Entry&>(*hand_);
      if (!entry.visited.exchange(false, std::memory_order_relaxed) && try_evict(entry)) {
        remove(entry);
        return &entry;
      }
      hand_ = entry.newer;
    }
    return nullptr;
  }

 private:
  SieveEntry* newest_ = nullptr;
  SieveEntry* oldest_ = nullptr;
  SieveEntry* hand_ = nullptr;  // the next to examine; null: the oldest
  size_t size_ = 0;
};

}  // namespace mk
