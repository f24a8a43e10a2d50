#include "store/ledger.h"

#include <algorithm>

namespace mk::store {

uint32_t Ledger::add(const Key& key, uint64_t num_bytes, uint32_t row) {
  const uint32_t at = header_.free_entries;
  if (at == kNone) return kNone;
  const uint32_t span = allocator_.allocate(header_.geometry.units(num_bytes));
  if (span == kNone) return kNone;
  header_.free_entries = view_.links[at].older;
  ++header_.num_writing;
  Entry& entry = view_.entries[at];
  // For a reader that finds the old key: the word, which says that this entry is free, was written
  // before.
  entry.hash.store(key.hash, std::memory_order_release);
  entry.scope.store(key.scope, std::memory_order_release);
  entry.num_bytes = num_bytes;
  entry.checksum = 0;
  entry.recency.store(0, std::memory_order_relaxed);
  entry.span = span;
  entry.first_unit = allocator_.start(span);
  entry.row_or_uses.store(static_cast<uint16_t>(row), std::memory_order_relaxed);
  entry.visited.store(0, std::memory_order_relaxed);
  entry.retention = Retention::kNormal;
  entry.word.store(word_of(generation_of(entry.word.load()) + 1, State::kWriting));
  index_.insert(at);
  return at;
}

void Ledger::publish(uint32_t at, uint64_t checksum, Retention retention, uint16_t position) {
  Entry& entry = view_.entries[at];
  entry.position = position;
  entry.checksum = checksum;
  entry.retention = retention;
  entry.recency.store(header_.clock.fetch_add(1) + 1, std::memory_order_relaxed);
  entry.word.store(word_of(generation_of(entry.word.load()), State::kReady));
  // Only now: until here it is the row, by which a death would be noticed. If the death comes in
  // between, the row's number is taken for a use count.
  entry.row_or_uses.store(1, std::memory_order_relaxed);
  enter_orders(at);
  --header_.num_writing;
  ++header_.num_ready;
}

void Ledger::retain(uint32_t at, Retention retention) {
  leave_orders(at);
  view_.entries[at].retention = retention;
  enter_orders(at);
}

void Ledger::order_uses(const std::vector<uint32_t>& entries) {
  std::vector<uint64_t> uses;
  for (const uint32_t at : entries) uses.push_back(view_.entries[at].recency.load());
  std::vector<uint64_t> in_order = uses;
  std::sort(in_order.begin(), in_order.end());
  for (size_t i = 0; i < entries.size(); ++i) {
    leave_orders(entries[i]);
    // A concurrent use takes no lock: it then keeps its own time.
    view_.entries[entries[i]].recency.compare_exchange_strong(uses[i], in_order[i]);
    enter_orders(entries[i]);
  }
}

void Ledger::doom(uint32_t at) {
  Entry& entry = view_.entries[at];
  const uint64_t word = entry.word.load();
  if (state_of(word) == State::kReady) {
    leave_orders(at);
    --header_.num_ready;
  } else {
    --header_.num_writing;
  }
  entry.word.store(word_of(generation_of(word), State::kDoomed));
  index_.unlink(at);
  list_doomed(at);
}

uint64_t Ledger::sweep() {
  if (header_.doomed_entries == kNone) return 0;
  const PinnedSet pinned(view_);  // after they were doomed: a later pin fails
  const uint64_t before = allocator_.free_units();
  uint32_t at = header_.doomed_entries;
  header_.doomed_entries = kNone;
  header_.num_doomed = 0;
  header_.doomed_units = 0;
  while (at != kNone) {
    const uint32_t next = view_.links[at].older;
    Entry& entry = view_.entries[at];
    const uint64_t generation = generation_of(entry.word.load());
    if (pinned.contains(at, generation)) {
      list_doomed(at);
    } else {
      allocator_.release(entry.span);
      entry.word.store(word_of(generation, State::kFree));
      list_free(at);
    }
    at = next;
  }
  return (allocator_.free_units() - before) * header_.geometry.alignment;
}

void Ledger::enter_orders(uint32_t at) {
  if (view_.entries[at].retention == Retention::kHard) return;
  heap_.push(at, lru_stamp(view_.entries[at]));
  queue_.push(at);
}

void Ledger::leave_orders(uint32_t at) {
  if (view_.entries[at].retention == Retention::kHard) return;
  heap_.remove(at);
  queue_.remove(at);
}

void Ledger::list_free(uint32_t at) {
  view_.links[at].older = header_.free_entries;
  header_.free_entries = at;
}

void Ledger::list_doomed(uint32_t at) {
  view_.links[at].older = header_.doomed_entries;
  header_.doomed_entries = at;
  ++header_.num_doomed;
  header_.doomed_units += header_.geometry.units(view_.entries[at].num_bytes);
}

}  // namespace mk::store
