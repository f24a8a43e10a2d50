#include "store/removals.h"

namespace mk::store {

void Removals::note(const Key& key) {
  if (header_.keeps_removals.load() == 0) return;
  const uint64_t at = end();
  // For a reader: if it sees a part of this removal, it sees next that this place was to be taken.
  Removal& removal = view_.removals[at % kNumRemovals];
  removal.hash.store(key.hash, std::memory_order_release);
  removal.scope.store(key.scope, std::memory_order_release);
  header_.end_of_removals.store(at + 1, std::memory_order_release);
}

void Removals::note_all() {
  if (header_.keeps_removals.load() == 0) return;
  header_.end_of_removals.store(end() + kNumRemovals, std::memory_order_release);
}

bool Removals::include(const Key& key, uint64_t begin) const {
  const uint64_t after = end();
  if (after - begin >= kNumRemovals) return true;
  for (uint64_t at = begin; at < after; ++at) {
    const Removal& removal = view_.removals[at % kNumRemovals];
    if (removal.hash.load() == key.hash && removal.scope.load() == key.scope) return true;
  }
  return false;
}

bool Removals::read(uint64_t begin, std::vector<Key>* keys, uint64_t* after) const {
  *after = end();
  if (*after - begin >= kNumRemovals) return false;
  for (uint64_t at = begin; at < *after; ++at) {
    const Removal& removal = view_.removals[at % kNumRemovals];
    keys->push_back({removal.hash.load(std::memory_order_acquire),
                     removal.scope.load(std::memory_order_acquire)});
  }
  return end() - begin < kNumRemovals;  // the place of the next one may be half written
}

}  // namespace mk::store
