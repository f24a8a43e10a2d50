// Eviction from a pool.
#include <algorithm>

#include "store/pool.h"
#include "store/victims.h"

namespace mk::store {
namespace {

Key key_of(const Entry& entry) { return {entry.hash.load(), entry.scope.load()}; }

// Dooms victims until they add up to `num_bytes`; some may turn out to be pinned.
template <class Victims>
void doom_victims(const View& view, Ledger* ledger, uint64_t num_bytes, Evicted* evicted) {
  const PinnedSet pinned(view);
  Victims victims(view, ledger, pinned);
  uint64_t left = num_bytes;
  while (left > 0) {
    const uint32_t at = victims.next();
    if (at == kNone) return;
    const Entry& entry = view.entries[at];
    const Geometry& geometry = view.header->geometry;
    evicted->keys.push_back(key_of(entry));
    ledger->doom(at);
    left -= std::min(left, uint64_t{geometry.units(entry.num_bytes)} * geometry.alignment);
  }
}

}  // namespace

Evicted Pool::evict(uint64_t num_bytes, Policy policy) {
  owner_.check("evict", "pool");
  const Lock lock(*this);
  Evicted evicted;
  do {
    evicted.num_bytes += ledger_.sweep();
    if (evicted.num_bytes >= num_bytes) break;
    const uint64_t left = num_bytes - evicted.num_bytes;
    if (policy == Policy::kLru) {
      doom_victims<LruVictims>(view_, &ledger_, left, &evicted);
    } else {
      doom_victims<SieveVictims>(view_, &ledger_, left, &evicted);
    }
    evicted.num_bytes += ledger_.sweep();
  } while (evicted.num_bytes < num_bytes && ledger_.reap() > 0);
  view_.header->num_evicted.fetch_add(evicted.keys.size(), std::memory_order_relaxed);
  return evicted;
}

Evicted Pool::evict_keys(const Key* keys, size_t count, const ObjectId* ids) {
  owner_.check("evict", "pool");
  const Lock lock(*this);
  Evicted evicted;
  const PinnedSet pinned(view_);
  for (size_t i = 0; i < count; ++i) {
    const Found found = index_.find(keys[i]);
    if (!found.is_ready() || is_pinned(view_, pinned, found.entry)) continue;
    if (ids && ids[i] != id_of(found.entry, generation_of(found.word))) continue;
    if (view_.entries[found.entry].retention == Retention::kHard) continue;
    evicted.keys.push_back(keys[i]);
    ledger_.doom(found.entry);
  }
  evicted.num_bytes = ledger_.sweep();
  view_.header->num_evicted.fetch_add(evicted.keys.size(), std::memory_order_relaxed);
  return evicted;
}

}  // namespace mk::store
