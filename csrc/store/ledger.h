// Ledger: what is done to a pool with its mutex held, and how it is set right when the holder died.
//
//   const uint32_t entry = ledger.add(key, num_bytes, row);    // kWriting; kNone: no room
//   ledger.publish(entry, checksum, retention, position);      // kReady
//   ledger.doom(entry);                                        // kDoomed: nobody finds it
//   ledger.sweep();                                            // kFree, unless somebody reads it
//
// The entries are the truth. Lists, orders, counts and the allocator's state follow from them, and
// rebuild() makes them anew. So an entry's word is written last when something is added, and first
// when something is taken away. Layer: store.
#pragma once

#include <vector>

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
        allocator_(&view.header->allocator, view.spans, view.header->geometry.num_spans()),
        heap_(view),
        queue_(view) {}

  uint32_t add(const Key& key, uint64_t num_bytes, uint32_t row);
  void publish(uint32_t entry, uint64_t checksum, Retention retention, uint16_t position);
  void retain(uint32_t entry, Retention retention);
  void order_uses(const std::vector<uint32_t>& entries);  // ready ones; the oldest first
  void doom(uint32_t entry);
  uint64_t sweep();  // bytes of the pool that are free now and were not

  // Gives up the rows of processes that have died, and dooms what they were writing; returns how
  // many there were. With what they were reading it is free after the next sweep().
  uint32_t reap();
  // All that follows from the entries. Throws Unavailable if they contradict one another.
  void rebuild();

  const Allocator& allocator() const { return allocator_; }
  LruHeap& heap() { return heap_; }
  SieveQueue& queue() { return queue_; }

 private:
  void enter_orders(uint32_t entry);
  void leave_orders(uint32_t entry);
  void list_free(uint32_t entry);
  void list_doomed(uint32_t entry);
  std::vector<bool> dead_rows() const;  // nobody's are dead, too
  void rebuild_lists();
  void rebuild_orders();

  const View& view_;
  Header& header_;
  Index index_;
  Allocator allocator_;
  LruHeap heap_;
  SieveQueue queue_;
};

// Where the heap puts an entry.
inline uint64_t lru_stamp(const Entry& entry) {
  const uint64_t is_soft = entry.retention == Retention::kSoft;
  return is_soft << 63 | entry.recency.load(std::memory_order_relaxed);
}

}  // namespace mk::store
