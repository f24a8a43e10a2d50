#include "store/index.h"

#include <vector>

namespace mk::store {
namespace {

// Each further one takes another process that removes from the bucket during a walk of its chain.
constexpr uint32_t kMaxTries = 1 << 16;

}  // namespace

// Keys may be hashes or plain numbers: in either case neighbours should not share a bucket.
Bucket& Index::bucket_of(const Key& key) const {
  uint64_t mixed = key.hash * 0x9e3779b97f4a7c15 + key.scope * 0xc2b2ae3d27d4eb4f;
  mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93;
  return view_.buckets[(mixed ^ mixed >> 32) & mask_];
}

Bucket& Index::bucket_of(const Entry& entry) const {
  return bucket_of(Key{entry.hash.load(), entry.scope.load()});
}

Found Index::find(const Key& key) const { return find_in(bucket_of(key), key); }

// Walks a chain to the key; else `found` has the place where it ended, kNone if it did not stray.
bool Index::walk(const Bucket& bucket, const Key& key, Found* found) const {
  uint32_t at = bucket.head.load(std::memory_order_acquire);
  // No chain is longer than the number of entries, but a reader may stray from one to another.
  for (uint32_t steps = 0; at < num_entries_ && steps < num_entries_; ++steps) {
    const Entry& entry = view_.entries[at];
    const uint64_t word = entry.word.load(std::memory_order_acquire);
    const bool is_key = entry.hash.load(std::memory_order_acquire) == key.hash &&
                        entry.scope.load(std::memory_order_acquire) == key.scope;
    // The key belongs to this generation if the word is unchanged.
    if (is_key && is_live(word) && entry.word.load(std::memory_order_acquire) == word) {
      *found = {at, word};
      return true;
    }
    at = entry.next.load(std::memory_order_acquire);
  }
  found->entry = at;
  return false;
}

Found Index::find_in(const Bucket& bucket, const Key& key) const {
  const uint32_t num_removed = bucket.num_removed.load(std::memory_order_acquire);
  Found found;
  if (walk(bucket, key, &found)) return found;
  const bool has_changed = bucket.num_removed.load(std::memory_order_acquire) != num_removed;
  return has_changed || found.entry != kNone ? find_again(bucket, key) : Found{};
}

Found Index::find_again(const Bucket& bucket, const Key& key) const {
  for (uint32_t tries = 0; tries < kMaxTries; ++tries) {
    const uint32_t num_removed = bucket.num_removed.load(std::memory_order_acquire);
    Found found;
    if (walk(bucket, key, &found)) return found;
    if (bucket.num_removed.load(std::memory_order_acquire) != num_removed) continue;
    if (found.entry != kNone) report(found.entry);
    return {};
  }
  view_.damage.report("its index never rests");
}

void Index::report(uint32_t at) const {
  view_.damage.report(at < num_entries_ ? "a chain of its index leads back into itself"
                                        : "a chain of its index leads out of it");
}

Bucket* Index::prefetch_bucket(const Key& key) const {
  Bucket& bucket = bucket_of(key);
  __builtin_prefetch(&bucket);
  return &bucket;
}

void Index::prefetch_entry(const Bucket& bucket) const {
  const uint32_t head = bucket.head.load(std::memory_order_relaxed);
  if (head < num_entries_) __builtin_prefetch(&view_.entries[head]);
}

void Index::insert(uint32_t at) {
  Entry& entry = view_.entries[at];
  Bucket& bucket = bucket_of(entry);
  entry.next.store(bucket.head.load(), std::memory_order_release);
  bucket.head.store(at, std::memory_order_release);
}

void Index::unlink(uint32_t at) {
  Entry& entry = view_.entries[at];
  Bucket& bucket = bucket_of(entry);
  std::atomic<uint32_t>* link = &bucket.head;
  uint32_t next = link->load();
  for (uint32_t steps = 0; next != at && next != kNone; next = link->load()) {
    if (next >= num_entries_ || ++steps > num_entries_) report(next);
    link = &view_.entries[next].next;
  }
  if (next == at) link->store(entry.next.load(), std::memory_order_release);
  bucket.num_removed.fetch_add(1, std::memory_order_release);
}

// Each change above is one store, so every chain is intact whenever its writer dies; at worst it
// contains an entry too many or lacks one. Readers continue meanwhile. Only damage leads a chain
// out of the entries, or to one that was seen before: there it is cut.
void Index::repair() {
  std::vector<bool> was_seen(num_entries_), is_linked(num_entries_);
  for (uint32_t i = 0; i <= mask_; ++i) {
    Bucket& bucket = view_.buckets[i];
    std::atomic<uint32_t>* link = &bucket.head;
    for (uint32_t at = link->load(); at != kNone; at = link->load()) {
      if (at >= num_entries_ || was_seen[at]) {
        link->store(kNone, std::memory_order_release);
        bucket.num_removed.fetch_add(1, std::memory_order_release);
        break;
      }
      was_seen[at] = true;
      Entry& entry = view_.entries[at];
      if (is_live(entry.word.load()) && &bucket_of(entry) == &bucket) {
        is_linked[at] = true;
        link = &entry.next;
      } else {
        link->store(entry.next.load(), std::memory_order_release);
        bucket.num_removed.fetch_add(1, std::memory_order_release);
      }
    }
  }
  for (uint32_t at = 0; at < num_entries_; ++at) {
    const uint64_t word = view_.entries[at].word.load();
    if (is_live(word) && !is_linked[at]) insert(at);
    // Unlinked, but perhaps not counted.
    if (state_of(word) == State::kDoomed) {
      bucket_of(view_.entries[at]).num_removed.fetch_add(1, std::memory_order_release);
    }
  }
}

}  // namespace mk::store
