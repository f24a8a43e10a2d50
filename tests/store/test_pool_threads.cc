// Threads that look objects up, pin and read them, while others put, remove and evict them.
#include <atomic>
#include <thread>

#include "pool_checks.h"

using namespace mk::store;

namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kRounds = 30000;
#else
constexpr int kRounds = 300000;
#endif

// Keys below kKept are always there; those above come and go, through the same buckets.
constexpr uint64_t kKept = 16, kAll = 48;

void read_all(Pool* pool, uint64_t seed, const std::atomic<bool>* done) {
  std::mt19937_64 random(seed);
  Key keys[kKept];
  for (uint64_t i = 0; i < kKept; ++i) keys[i] = {i, 5};
  while (!*done) {
    EXPECT(pool->match_prefix(keys, kKept) == kKept);
    const Key key{random() % kAll, 5};
    if (const auto pin = pool->pin(key)) {
      EXPECT(is_filled(pin->data, pin->num_bytes, key));
      pool->unpin(*pin);
    } else {
      EXPECT(key.hash >= kKept);
    }
  }
}

void change(Pool* pool, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int i = 0; i < kRounds; ++i) {
    const Key key{kKept + random() % (kAll - kKept), 5};
    if (random() % 2) {
      if (put(pool, key, random() % 300) == PutState::kFull) pool->evict(256, Policy::kSieve);
    } else if (random() % 4) {
      pool->remove(key);
    } else {
      pool->evict(64, Policy::kLru);
    }
  }
}

// Looks again and again at what comes and goes, and in the end at what is there.
void watch(const std::shared_ptr<Pool>& pool, const std::atomic<bool>* done) {
  Watch watch(pool);
  KeySet keys;
  while (!*done) follow(&watch, &keys);
  follow(&watch, &keys);
  const std::vector<ObjectInfo> objects = pool->scan();
  EXPECT(keys.size() == objects.size());
  for (const ObjectInfo& object : objects) {
    EXPECT(keys.count({object.key.hash, object.key.scope}) == 1);
  }
}

// Reads all removals while they are noted, as far as the pool still has them.
void read_removals(Pool* pool, const std::atomic<bool>* done) {
  Removals& removals = pool->removals();
  uint64_t begin = removals.first(), num_read = 0, num_missed = 0;
  while (!*done || removals.end() != begin) {
    std::vector<Key> keys;
    uint64_t end = 0;
    if (removals.read(begin, &keys, &end)) {
      EXPECT(keys.size() == end - begin);
      for (const Key& key : keys) {
        EXPECT(key.hash >= kKept && key.hash < kAll && key.scope == 5);
      }
      num_read += keys.size();
    } else {
      EXPECT(removals.end() - begin >= kNumRemovals);
      num_missed += end - begin;
    }
    begin = end;
    removals.forget(end);
  }
  EXPECT(num_read + num_missed == begin && num_read > 0 && removals.first() == begin);
}

}  // namespace

int main() {
  Geometry geometry = Geometry::of(100 * 64, 64, 40, 4, 64);
  geometry.num_buckets = 2;  // long chains, on which readers stray
  const auto pool = Pool::create("", geometry);
#ifdef __SANITIZE_THREAD__  // which takes memory that is mapped twice for two pieces of memory
  const auto other = pool;
#else
  const auto other = Pool::open(pool->path());
#endif
  for (uint64_t i = 0; i < kKept; ++i) put(pool.get(), {i, 5}, 40 + i, Retention::kHard);
  std::atomic<bool> done = false;
  pool->keep_removals();
  std::vector<std::thread> readers, writers;
  readers.emplace_back(read_removals, other.get(), &done);
  readers.emplace_back(watch, other, &done);
  for (uint64_t i = 0; i < 2; ++i) {
    readers.emplace_back(read_all, i ? other.get() : pool.get(), i, &done);
    writers.emplace_back(change, i ? pool.get() : other.get(), 100 + i);
  }
  for (std::thread& writer : writers) writer.join();
  done = true;
  for (std::thread& reader : readers) reader.join();
  const PoolStats stats = pool->stats();
  EXPECT(stats.num_pins == 0 && stats.num_doomed == 0 && stats.num_writing == 0);
  EXPECT(pool->evict(UINT64_MAX, Policy::kLru).keys.size() == stats.num_ready - kKept);
  return failures() != 0;
}
