// Index: maps a key to its entry; lookups take no lock.
//
//   const Found found = index.find(key);          // any process, any time
//   index.insert(entry);  index.unlink(entry);    // the holder of the pool's mutex
//
// Buckets of chained entries. An unlinked entry still leads on along its old chain until it is
// reused in another; a reader that stands on it then strays. So each bucket counts the entries
// unlinked from it, before they can be reused: a reader that finds nothing and sees the count
// changed looks again. Layer: store.
#pragma once

#include <cstddef>

#include "store/layout.h"

namespace mk::store {

struct Found {
  uint32_t entry = kNone;
  uint64_t word = 0;
  bool is_ready() const { return entry != kNone && state_of(word) == State::kReady; }
};

class Index {
 public:
  explicit Index(const View& view)
      : view_(view),
        mask_(view.geometry.num_buckets - 1),
        num_entries_(view.geometry.num_entries) {}

  // The entry under this key that is being written or is ready.
  Found find(const Key& key) const;

  // Calls visit(i, found) for i = 0, 1, ... until it returns false. Prefetches for a few keys
  // ahead: a pool's index does not fit the cache.
  template <class Visit>
  void find_each(const Key* keys, size_t count, Visit visit) const {
    constexpr size_t kAhead = 16;
    Bucket* ahead[kAhead];
    for (size_t begin = 0; begin < count; begin += kAhead) {
      const size_t size = count - begin < kAhead ? count - begin : kAhead;
      for (size_t i = 0; i < size; ++i) ahead[i] = prefetch_bucket(keys[begin + i]);
      for (size_t i = 0; i < size; ++i) prefetch_entry(*ahead[i]);
      for (size_t i = 0; i < size; ++i) {
        if (!visit(begin + i, find_in(*ahead[i], keys[begin + i]))) return;
      }
    }
  }

  // These require the pool's mutex.
  void insert(uint32_t entry);
  void unlink(uint32_t entry);  // may be called for an entry that is in no chain
  // Unlinks all entries but those that are live and in the right chain; inserts the missing ones.
  void repair();

 private:
  Bucket& bucket_of(const Key& key) const;
  Bucket& bucket_of(const Entry& entry) const;
  Bucket* prefetch_bucket(const Key& key) const;
  void prefetch_entry(const Bucket& bucket) const;
  Found find_in(const Bucket& bucket, const Key& key) const;
  [[gnu::cold, gnu::noinline]] Found find_again(const Bucket& bucket, const Key& key) const;
  [[gnu::always_inline]] inline bool walk(const Bucket& bucket, const Key& key, Found* found) const;
  [[noreturn, gnu::cold, gnu::noinline]] void report(uint32_t at) const;

  const View& view_;
  const uint32_t mask_;
  const uint32_t num_entries_;
};

}  // namespace mk::store
