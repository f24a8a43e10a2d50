// Index: from a key to its entry, without a lock for who looks something up.
//
//   const Found found = index.find(key);          // any process, any time
//   index.insert(entry);  index.unlink(entry);    // who holds the pool's mutex
//
// Buckets of chained entries. An entry that is taken out of a chain still leads on along it, until
// it is used again in another; a reader that was standing on it then strays. So each bucket counts
// the entries that were taken out of it before they can be used again: who finds nothing and sees
// another count looks again. Layer: store.
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
        mask_(view.header->geometry.num_buckets - 1),
        num_entries_(view.header->geometry.num_entries) {}

  // The entry that is being written or ready under this key.
  Found find(const Key& key) const;

  // Calls visit(i, found) for i = 0, 1, ... until it returns false. Memory is asked for some keys
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

  // With the pool's mutex held.
  void insert(uint32_t entry);
  void unlink(uint32_t entry);  // also of one that is in no chain
  // Takes out all entries but those that are live and where they belong; puts in those missing.
  void repair();

 private:
  Bucket& bucket_of(const Key& key) const;
  Bucket& bucket_of(const Entry& entry) const;
  Bucket* prefetch_bucket(const Key& key) const;
  void prefetch_entry(const Bucket& bucket) const;
  Found find_in(const Bucket& bucket, const Key& key) const;

  const View& view_;
  const uint32_t mask_;
  const uint32_t num_entries_;
};

}  // namespace mk::store
