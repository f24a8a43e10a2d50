#include "store/ledger.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace mk::store {

uint32_t Ledger::add(const Key& key, uint64_t num_bytes, uint32_t row) {
  const uint32_t at = header_.free_entries;
  if (at == kNone) return kNone;
  Entry& entry = listed(at, State::kFree);
  const uint32_t span = allocator_.allocate(view_.geometry.units(num_bytes));
  if (span == kNone) return kNone;
  header_.free_entries = view_.links[at].older;
  ++header_.num_writing;
  // For a reader that finds the old key: the word, which says that this entry is free, was written
  // before.
  entry.hash.store(key.hash, std::memory_order_release);
  entry.scope.store(key.scope, std::memory_order_release);
  entry.extent.store(Entry::extent_of(num_bytes, 0), std::memory_order_relaxed);
  entry.checksum = 0;
  entry.recency.store(0, std::memory_order_relaxed);
  entry.span.store(span, std::memory_order_relaxed);
  entry.first_unit.store(allocator_.start(span), std::memory_order_relaxed);
  entry.row_or_uses.store(static_cast<uint16_t>(row), std::memory_order_relaxed);
  entry.visited.store(0, std::memory_order_relaxed);
  entry.retention = Retention::kNormal;
  entry.word.store(word_of(generation_of(entry.word.load()) + 1, State::kWriting));
  index_.insert(at);
  return at;
}

void Ledger::publish(uint32_t at, uint64_t checksum, Retention retention, uint16_t position) {
  Entry& entry = view_.entries[at];
  changes_.note(at);
  const uint64_t num_bytes = entry.num_bytes();
  entry.extent.store(Entry::extent_of(num_bytes, position), std::memory_order_relaxed);
  entry.checksum = checksum;
  entry.retention = retention;
  entry.recency.store(header_.clock.fetch_add(1) + 1, std::memory_order_relaxed);
  entry.word.store(word_of(generation_of(entry.word.load()), State::kReady));
  // Only now: until here it is the row, by which a death would be noticed. If the death comes in
  // between, the row's number is taken for a use count.
  entry.row_or_uses.store(1, std::memory_order_release);
  enter_orders(at);
  --header_.num_writing;
  ++header_.num_ready;
  header_.num_stored.fetch_add(1, std::memory_order_relaxed);
  header_.stored_bytes.fetch_add(num_bytes, std::memory_order_relaxed);
}

void Ledger::retain(uint32_t at, Retention retention) {
  Entry& entry = view_.entries[at];
  const bool is_ordered = entry.retention != Retention::kHard;
  if (is_ordered && retention != Retention::kHard) {  // SIEVE's queue is the same for both
    entry.retention = retention;
    heap_.restamp(at, lru_stamp(entry));
    return;
  }
  leave_orders(at);
  entry.retention = retention;
  enter_orders(at);
}

void Ledger::order_uses(const std::vector<uint32_t>& entries) {
  std::vector<uint64_t> uses;
  for (const uint32_t at : entries) uses.push_back(view_.entries[at].recency.load());
  std::vector<uint64_t> in_order = uses;
  std::sort(in_order.begin(), in_order.end());
  order_arrivals(entries);
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = view_.entries[entries[i]];
    // A concurrent use takes no lock: it then keeps its own time.
    entry.recency.compare_exchange_strong(uses[i], in_order[i]);
    if (entry.retention != Retention::kHard) heap_.restamp(entries[i], lru_stamp(entry));
  }
}

// The same in SIEVE's queue, for those that arrived lately. The others keep their places: of these
// the queue does not tell which is older, and to make them the newest would keep what no one uses.
void Ledger::order_arrivals(const std::vector<uint32_t>& entries) {
  std::vector<uint32_t> wanted;
  std::unordered_map<uint32_t, size_t> place_of;
  for (const uint32_t at : entries) {
    if (view_.entries[at].retention == Retention::kHard) continue;
    if (place_of.emplace(at, kNone).second) wanted.push_back(at);
  }
  std::vector<uint32_t> places;  // who is there, the oldest first
  uint32_t at = queue_.newest();
  for (size_t left = 4 * wanted.size() + 64;
       left > 0 && at != kNone && places.size() < wanted.size(); --left, at = queue_.older(at)) {
    if (place_of.count(at)) places.push_back(at);
  }
  std::reverse(places.begin(), places.end());
  for (size_t i = 0; i < places.size(); ++i) place_of[places[i]] = i;
  size_t to = 0;
  for (const uint32_t arrival : wanted) {
    const size_t from = place_of[arrival];
    if (from == kNone) continue;
    queue_.swap(arrival, places[to]);
    place_of[places[to]] = from;
    std::swap(places[to++], places[from]);
  }
}

void Ledger::doom(uint32_t at) {
  Entry& entry = view_.entries[at];
  const uint64_t word = entry.word.load();
  if (state_of(word) == State::kReady) {
    changes_.note(at);
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
  uint32_t left = view_.geometry.num_entries;
  header_.doomed_entries = kNone;
  header_.num_doomed = 0;
  header_.doomed_units = 0;
  while (at != kNone) {
    if (left-- == 0) view_.damage.report("its list of removed objects leads back into itself");
    Entry& entry = listed(at, State::kDoomed);
    const uint32_t next = view_.links[at].older;
    const uint64_t generation = generation_of(entry.word.load());
    if (pinned.contains(at, generation)) {
      list_doomed(at);
    } else {
      const uint32_t span = entry.span.load(std::memory_order_relaxed);
      if (allocator_.start(span) != entry.first_unit.load(std::memory_order_relaxed) ||
          allocator_.size(span) != view_.units_of(entry)) {
        view_.damage.report("an object is not where its allocator has it");
      }
      allocator_.release(span);
      entry.word.store(word_of(generation, State::kFree));
      list_free(at);
    }
    at = next;
  }
  return (allocator_.free_units() - before) * view_.geometry.alignment;
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

Entry& Ledger::listed(uint32_t at, State state) const {
  if (at >= view_.geometry.num_entries)
    view_.damage.report("a list of its entries leads out of it");
  Entry& entry = view_.entries[at];
  if (state_of(entry.word.load()) != state) {
    view_.damage.report("a list of its entries has one of another state");
  }
  return entry;
}

void Ledger::list_free(uint32_t at) {
  view_.links[at].older = header_.free_entries;
  header_.free_entries = at;
}

void Ledger::list_doomed(uint32_t at) {
  view_.links[at].older = header_.doomed_entries;
  header_.doomed_entries = at;
  ++header_.num_doomed;
  header_.doomed_units += view_.units_of(view_.entries[at]);
}

}  // namespace mk::store
