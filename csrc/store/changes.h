// Changes: which entries of a pool became an object lately, or ceased to be one, for a process that
// tells others what the pool has; see Watch. They are noted before they are made, so that a death
// in between hides none.
//
//   changes.note(entry);                                     // with the pool's mutex
//   if (changes.has(begin)) use(changes.entry(begin));       // the same
//   changes.end();                                           // any process, any time
//
// Changes are numbered. A ring has the last ones; who has missed some that it no longer has must
// look at all entries. Layer: store.
#pragma once

#include "store/layout.h"

namespace mk::store {

class Changes {
 public:
  explicit Changes(const View& view) : view_(view), header_(*view.header) {}

  uint64_t end() const { return header_.end_of_changes.load(std::memory_order_acquire); }

  // These require the pool's mutex.
  void note(uint32_t entry) {
    view_.changes[end() % kNumChanges] = entry;
    header_.end_of_changes.store(end() + 1, std::memory_order_release);
  }
  // Whether all changes from this number on are known: one less than there is room for, since a
  // process may have died while it overwrote the oldest.
  bool has(uint64_t begin) const { return end() - begin < kNumChanges; }
  uint32_t entry(uint64_t at) const { return view_.changes[at % kNumChanges]; }

 private:
  const View& view_;
  Header& header_;
};

}  // namespace mk::store
