// Victims: the objects that an eviction takes, one by one, according to a policy.
//
//   LruVictims victims(view, ledger, pinned);
//   while (freed < wanted && (entry = victims.next()) != kNone) ledger->doom(entry);
//
// Skips objects that are being read. Each object returned must be doomed, or passed over, before
// the next call.
// Requires the pool's mutex. Layer: store.
#pragma once

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "store/ledger.h"

namespace mk::store {

// An entry of the orders, which have only those that may be evicted.
inline Entry& evictable(const View& view, uint32_t at) {
  Entry& entry = view.entries[at];
  if (state_of(entry.word.load()) != State::kReady || entry.retention == Retention::kHard) {
    view.damage.report("the orders of its objects have one that cannot be evicted");
  }
  return entry;
}

inline bool is_pinned(const View& view, const PinnedSet& pinned, uint32_t at) {
  return pinned.contains(at, generation_of(view.entries[at].word.load()));
}

class LruVictims {
 public:
  LruVictims(const View& view, Ledger* ledger, const PinnedSet& pinned)
      : view_(view), heap_(ledger->heap()), pinned_(pinned), begun_(view.header->clock.load()) {}
  LruVictims(const LruVictims&) = delete;
  ~LruVictims() {
    try {
      for (const HeapItem& item : passed_over_) heap_.push(item.entry, item.stamp);
    } catch (const PoolDamaged&) {  // the heap will be rebuilt
    }
  }

  uint32_t next() {
    for (; heap_.size() > 0; ++num_steps_) {
      if (num_steps_ > max_steps_) view_.damage.report("the heap of its uses never rests");
      const HeapItem top = heap_.top();
      const uint64_t stamp = lru_stamp(evictable(view_, top.entry));
      // Uses after the start are ignored; otherwise this might never end.
      const bool is_of_before = (top.stamp & ~(uint64_t{1} << 63)) <= begun_;
      if (stamp > top.stamp && is_of_before) {
        heap_.restamp(top.entry, stamp);
      } else if (is_pinned(view_, pinned_, top.entry)) {
        pass_over(top.entry);
      } else {
        return top.entry;
      }
    }
    return kNone;
  }

  // Leaves what next() returned where it is; it is not returned again.
  void pass_over(uint32_t at) {
    passed_over_.push_back(heap_.top());
    heap_.remove(at);
  }

 private:
  const View& view_;
  LruHeap& heap_;
  const PinnedSet& pinned_;
  const uint64_t begun_;
  // Each object is passed over or taken once, and gets another stamp twice before, or some times
  // more if readers were about to write one.
  const uint64_t max_steps_ = 4 * uint64_t{heap_.size()} + (1 << 16);
  uint64_t num_steps_ = 0;
  std::vector<HeapItem> passed_over_;
};

class SieveVictims {
 public:
  SieveVictims(const View& view, Ledger* ledger, const PinnedSet& pinned)
      : view_(view), queue_(ledger->queue()), heap_(ledger->heap()), pinned_(pinned) {}

  uint32_t next() {
    size_t num_skipped = 0;
    while (steps_left_ > 0 || !takes_soft_) {
      if (steps_left_ == 0) {
        takes_soft_ = true;
        steps_left_ = two_rounds();
      }
      const uint32_t at = queue_.hand();
      if (at == kNone) break;
      if (passed_over_.count(at)) {  // as if it had gone: no step
        if (++num_skipped > passed_over_.size()) break;
        queue_.pass();
        continue;
      }
      num_skipped = 0;
      Entry& entry = evictable(view_, at);
      const bool is_spared = entry.retention == Retention::kSoft && !takes_soft_;
      if (!is_spared && !entry.visited.exchange(0) && !is_pinned(view_, pinned_, at)) return at;
      queue_.pass();
      --steps_left_;
    }
    return kNone;
  }

  void pass_over(uint32_t at) {
    passed_over_.insert(at);
    queue_.pass();
  }

 private:
  uint64_t two_rounds() const {
    const uint64_t num_objects = heap_.size();
    return 2 * (num_objects - std::min<uint64_t>(num_objects, passed_over_.size())) + 1;
  }

  const View& view_;
  SieveQueue& queue_;
  const LruHeap& heap_;  // which has as many
  const PinnedSet& pinned_;
  std::unordered_set<uint32_t> passed_over_;
  bool takes_soft_ = false;
  uint64_t steps_left_ = two_rounds();
};

}  // namespace mk::store
