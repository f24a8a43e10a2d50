// Rows: the processes that use a pool, and what each of them is reading.
//
//   const uint32_t row = claim_row(view);               // with the pool's mutex
//   OwnSlots slots(view, row);
//   const uint32_t slot = slots.take();                 // any thread of this process
//   view.slots[slot].store(slot_of(entry, generation)); // a pin, if the entry is still ready then
//   PinnedSet(view).contains(entry, generation);        // pinned by any process
//
// A pin is a word in a slot of its process's row rather than a count, so that its owner is still
// known after that process has died. (M. Michael, "Hazard Pointers", IEEE TPDS 2004.) Layer: store.
#pragma once

#include <mutex>
#include <vector>

#include "store/layout.h"
#include "store/process.h"

namespace mk::store {

// A row for this process, or kNone if all are taken. Requires the pool's mutex.
uint32_t claim_row(const View& view);
// Whether the row has an owner that is alive.
bool is_alive(const Row& row);
// Empties all slots of a row and releases it.
void clear_row(const View& view, uint32_t row);

// The slots of this process's own row.
class OwnSlots {
 public:
  OwnSlots(const View& view, uint32_t row);

  uint32_t take();  // kNone: all are in use
  void give_back(uint32_t slot);

 private:
  const View& view_;
  const uint32_t row_;
  std::mutex mutex_;
  uint32_t num_used_ = 0;           // as the row says
  std::vector<uint32_t> returned_;  // reused last in, first out, so that few are ever used
};

// All pins at one moment.
class PinnedSet {
 public:
  explicit PinnedSet(const View& view);
  bool contains(uint32_t entry, uint64_t generation) const;
  size_t size() const { return words_.size(); }

 private:
  std::vector<uint64_t> words_;  // sorted
};

}  // namespace mk::store
