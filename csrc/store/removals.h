// Removals: which keys were removed from a pool lately, for a process that has objects elsewhere,
// too, as on a disk, and must not give out what others have removed.
//
//   removals.keep();                                         // with the pool's mutex
//   removals.note(key);                                      // the same
//   removals.read(removals.first(), &keys, &end);            // any process, any time
//   removals.forget(end);                                    // what was read is done
//
// Removals are numbered. A ring has the last ones; who has missed some that it no longer has must
// take all objects for removed. Layer: store.
#pragma once

#include <cstdint>
#include <vector>

#include "store/layout.h"

namespace mk::store {

class Removals {
 public:
  explicit Removals(const View& view) : view_(view), header_(*view.header) {}

  // These require the pool's mutex.
  void keep() { header_.keeps_removals.store(1); }  // from now on; nothing ends it
  void note(const Key& key);
  void note_all();  // as if all keys had been removed
  // Whether a key was removed since `begin`; true if it is not known any more.
  bool include(const Key& key, uint64_t begin) const;

  uint64_t first() const { return header_.first_removal.load(std::memory_order_acquire); }
  uint64_t end() const { return header_.end_of_removals.load(std::memory_order_acquire); }
  // Appends the removals from `begin` up to `end`. False: some of them are not known any more.
  bool read(uint64_t begin, std::vector<Key>* keys, uint64_t* end) const;
  void forget(uint64_t end) { header_.first_removal.store(end, std::memory_order_release); }

 private:
  const View& view_;
  Header& header_;
};

}  // namespace mk::store
