// Eviction from a pool.
#include <algorithm>

#include "store/pool.h"
#include "store/victims.h"

namespace mk::store {
namespace {

Key key_of(const Entry& entry) { return {entry.hash.load(), entry.scope.load()}; }

// Calls `take` with victims until they add up to `num_bytes`; some may turn out to be pinned.
template <class Victims, class Take>
void take_victims(const View& view, Ledger* ledger, uint64_t num_bytes, const Take& take) {
  const PinnedSet pinned(view);
  Victims victims(view, ledger, pinned);
  uint64_t left = num_bytes;
  while (left > 0) {
    const uint32_t at = victims.next();
    if (at == kNone) return;
    const uint64_t units = view.units_of(view.entries[at]);
    left -= std::min(left, units * view.geometry.alignment);
    take(&victims, at);
  }
}

template <class Take>
void take_victims(Policy policy, const View& view, Ledger* ledger, uint64_t num_bytes,
                  const Take& take) {
  if (policy == Policy::kLru) {
    take_victims<LruVictims>(view, ledger, num_bytes, take);
  } else {
    take_victims<SieveVictims>(view, ledger, num_bytes, take);
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
    take_victims(policy, view_, &ledger_, left, [&](auto*, uint32_t at) {
      evicted.keys.push_back(key_of(view_.entries[at]));
      ledger_.doom(at);
    });
    evicted.num_bytes += ledger_.sweep();
  } while (evicted.num_bytes < num_bytes && ledger_.reap() > 0);
  view_.header->num_evicted.fetch_add(evicted.keys.size(), std::memory_order_relaxed);
  return evicted;
}

std::vector<ObjectInfo> Pool::victims(uint64_t num_bytes, Policy policy) {
  owner_.check("victims", "pool");
  const Lock lock(*this);
  std::vector<ObjectInfo> chosen;
  take_victims(policy, view_, &ledger_, num_bytes, [&](auto* victims, uint32_t at) {
    chosen.push_back(info_of(at));
    victims->pass_over(at);
  });
  return chosen;
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
