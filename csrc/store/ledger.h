// Ledger: the changes to a pool, made with its mutex held, and their repair if the holder dies.
//
//   const uint32_t entry = ledger.add(key, num_bytes, row);    // kWriting; kNone: no room
//   ledger.publish(entry, checksum, retention, position);      // kReady
//   ledger.doom(entry);                                        // kDoomed: no lookup finds it
//   ledger.sweep();                                            // kFree, unless a reader has it
//
// The entries are authoritative. Lists, orders, counts and the allocator's state follow from them,
// and rebuild() recomputes these. So an entry's word is written last when something is added, and
// first when something is removed. Layer: store. Requires the pool's mutex.
#pragma once

#include <vector>

#include "store/changes.h"
#include "store/index.h"
#include "store/layout.h"
#include "store/lru_heap.h"
#include "store/rows.h"
#include "store/sieve_queue.h"

namespace mk::store {

class Ledger {
 public:
  explicit Ledger(const View& view)
      : view_(view),
        header_(*view.header),
        index_(view),
        changes_(view),
        allocator_(&view.header->allocator, view.spans, view.geometry.num_spans(),
                   view.geometry.num_units, &view.damage),
        heap_(view),
        queue_(view) {}

  uint32_t add(const Key& key, uint64_t num_bytes, uint32_t row);
  void publish(uint32_t entry, uint64_t checksum, Retention retention, uint16_t position);
  void retain(uint32_t entry, Retention retention);
  void order_uses(const std::vector<uint32_t>& entries);  // ready entries, the oldest first
  void doom(uint32_t entry);
  uint64_t sweep();  // returns the bytes freed

  // Releases the rows of dead processes and dooms what they were writing; returns the number of
  // processes. What they were reading is free after the next sweep().
  uint32_t reap();
  // Recomputes everything that follows from the entries, and reports damage if they contradict each
  // other.
  void rebuild();

  const Allocator& allocator() const { return allocator_; }
  LruHeap& heap() { return heap_; }
  SieveQueue& queue() { return queue_; }

 private:
  void order_arrivals(const std::vector<uint32_t>& entries);
  void enter_orders(uint32_t entry);
  void leave_orders(uint32_t entry);
  // The entry at the head of a list, or `next` in it, which must be in this state.
  Entry& listed(uint32_t entry, State state) const;
  void list_free(uint32_t entry);
  void list_doomed(uint32_t entry);
  std::vector<bool> dead_rows() const;  // unused rows count as dead
  void rebuild_lists();
  void rebuild_orders();

  const View& view_;
  Header& header_;
  Index index_;
  Changes changes_;
  Allocator allocator_;
  LruHeap heap_;
  SieveQueue queue_;
};

// An entry's position in the heap's order.
inline uint64_t lru_stamp(const Entry& entry) {
  const uint64_t is_soft = entry.retention == Retention::kSoft;
  return is_soft << 63 | entry.recency.load(std::memory_order_relaxed);
}

}  // namespace mk::store
