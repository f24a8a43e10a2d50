// What must hold of a pool whatever has happened to its processes, and content that tells its key.
#pragma once

#include <sys/wait.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "expect.h"
#include "store/checksum.h"
#include "store/objects.h"
#include "store/watch.h"

namespace mk::store {

inline uint64_t mixed(uint64_t value) { return (value + 1) * 0x9e3779b97f4a7c15; }

// The bytes of an object: of its key, its size and where they are.
inline void fill(char* data, uint64_t num_bytes, const Key& key) {
  for (uint64_t i = 0; i < num_bytes; ++i) {
    data[i] = static_cast<char>(mixed(key.hash ^ num_bytes << 32 ^ i) >> 56);
  }
}

inline bool is_filled(const char* data, uint64_t num_bytes, const Key& key) {
  std::vector<char> expected(num_bytes);
  fill(expected.data(), num_bytes, key);
  return std::equal(expected.begin(), expected.end(), data);
}

inline PutState put(Pool* pool, const Key& key, uint64_t num_bytes,
                    Retention retention = Retention::kNormal) {
  std::vector<char> bytes(num_bytes);
  fill(bytes.data(), num_bytes, key);
  return put_from(pool, key, {{bytes.data(), num_bytes}}, {true, retention});
}

using KeySet = std::set<std::pair<uint64_t, uint64_t>>;

// Follows a pool by another look at it: nothing comes twice, or goes without having come.
inline void follow(Watch* watch, KeySet* keys) {
  const Watch::Found found = watch->look();
  for (const Key& key : found.removed) EXPECT(keys->erase({key.hash, key.scope}) == 1);
  for (const Key& key : found.stored) EXPECT(keys->insert({key.hash, key.scope}).second);
}

// All that is ready can be read and is what it should be, and no space is lost. Returns the keys.
inline std::vector<Key> check_pool(Pool* pool) {
  pool->reap();
  const PoolStats stats = pool->stats();
  EXPECT(stats.num_writing == 0);
  EXPECT(stats.num_doomed == 0);
  EXPECT(stats.num_pins == 0);
  EXPECT(stats.num_processes == 1);
  std::vector<Key> keys;
  uint64_t used_bytes = 0;
  for (const ObjectInfo& object : pool->scan()) {
    const auto pin = pool->pin(object.key);
    EXPECT(pin.has_value());
    if (!pin) continue;
    EXPECT(pin->num_bytes == object.num_bytes);
    EXPECT(is_filled(pin->data, pin->num_bytes, object.key));
    EXPECT(pin->checksum == checksum_of(pin->data, pin->num_bytes));
    pool->unpin(*pin);
    used_bytes += uint64_t{pool->geometry().units(object.num_bytes)} * pool->geometry().alignment;
    keys.push_back(object.key);
  }
  EXPECT(keys.size() == stats.num_ready);
  EXPECT(used_bytes + stats.free_bytes == stats.capacity_bytes);
  return keys;
}

// It can be emptied, by either policy, and then filled to the last byte.
inline void check_usable(Pool* pool, Policy policy) {
  const PoolStats before = pool->stats();
  const Evicted evicted = pool->evict(UINT64_MAX, policy);
  EXPECT(evicted.keys.size() == before.num_ready);
  EXPECT(evicted.num_bytes == before.capacity_bytes - before.free_bytes);
  for (const Key& key : evicted.keys) EXPECT(!pool->contains(key));
  const PoolStats empty = pool->stats();
  EXPECT(empty.num_ready == 0 && empty.num_free_spans == 1);
  EXPECT(empty.largest_free_bytes == empty.capacity_bytes);
  EXPECT(put(pool, {99, 99}, empty.capacity_bytes) == PutState::kOpen);
  EXPECT(put(pool, {98, 98}, 1) == PutState::kFull);
  EXPECT(pool->remove({99, 99}) && !pool->remove({99, 99}));
}

}  // namespace mk::store
