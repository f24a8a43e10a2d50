// Repair after a death: of any process, its row; of the mutex's holder, all unfinished changes.
#include <algorithm>
#include <utility>
#include <vector>

#include "store/ledger.h"

namespace mk::store {

std::vector<bool> Ledger::dead_rows() const {
  std::vector<bool> is_dead(view_.geometry.num_rows);
  for (uint32_t i = 0; i < view_.geometry.num_rows; ++i) {
    is_dead[i] = !is_alive(view_.rows[i]);
  }
  return is_dead;
}

uint32_t Ledger::reap() {
  const std::vector<bool> is_dead = dead_rows();
  const auto is_to_clear = [&](uint32_t row) { return is_dead[row] && view_.rows[row].pid.load(); };
  uint32_t num_dead = 0;
  for (uint32_t row = 0; row < is_dead.size(); ++row) num_dead += is_to_clear(row);
  if (num_dead == 0) return 0;
  // First what they were writing: a released row may be claimed at once.
  for (uint32_t at = 0; at < view_.geometry.num_entries; ++at) {
    const Entry& entry = view_.entries[at];
    if (state_of(entry.word.load()) == State::kWriting && is_dead[view_.row_of(entry)]) doom(at);
  }
  for (uint32_t row = 0; row < is_dead.size(); ++row) {
    if (is_to_clear(row)) clear_row(view_, row);
  }
  return num_dead;
}

void Ledger::rebuild() {
  const std::vector<bool> is_dead = dead_rows();
  // Does not use the lists, which doom() needs; covers writers that released their rows long ago,
  // too.
  for (uint32_t at = 0; at < view_.geometry.num_entries; ++at) {
    Entry& entry = view_.entries[at];
    const uint64_t word = entry.word.load();
    if (state_of(word) == State::kWriting && is_dead[view_.row_of(entry)]) {
      entry.word.store(word_of(generation_of(word), State::kDoomed));
    }
  }
  index_.repair();
  rebuild_lists();
  rebuild_orders();
  reap();
  sweep();
  ++header_.num_rebuilds;
}

void Ledger::rebuild_lists() {
  header_.free_entries = header_.doomed_entries = kNone;
  header_.num_writing = header_.num_ready = header_.num_doomed = 0;
  header_.doomed_units = 0;
  std::vector<uint32_t> owners;
  for (uint32_t at = view_.geometry.num_entries; at-- > 0;) {
    const State state = state_of(view_.entries[at].word.load());
    if (state == State::kFree) {
      list_free(at);
      continue;
    }
    if (state > State::kDoomed) view_.damage.report("an entry has no state");
    if (state == State::kDoomed) list_doomed(at);
    if (state == State::kWriting) ++header_.num_writing;
    if (state == State::kReady) ++header_.num_ready;
    owners.push_back(at);
  }
  const auto start = [&](uint32_t at) { return view_.entries[at].first_unit.load(); };
  std::sort(owners.begin(), owners.end(),
            [&](uint32_t a, uint32_t b) { return start(a) < start(b); });
  std::vector<Range> used;
  for (const uint32_t at : owners) {
    used.push_back({start(at), view_.units_of(view_.entries[at]), kNone});
  }
  if (!allocator_.rebuild(&used)) {
    view_.damage.report("two of its objects are in one place, or one reaches out of it");
  }
  for (size_t i = 0; i < owners.size(); ++i) view_.entries[owners[i]].span.store(used[i].span);
}

void Ledger::rebuild_orders() {
  header_.heap_size = 0;
  header_.newest = header_.oldest = header_.hand = kNone;
  // The order of arrival, which SIEVE would need, is not stored; the order of use approximates it.
  std::vector<std::pair<uint64_t, uint32_t>> by_use;
  for (uint32_t at = 0; at < view_.geometry.num_entries; ++at) {
    const Entry& entry = view_.entries[at];
    if (state_of(entry.word.load()) == State::kReady) by_use.emplace_back(entry.recency.load(), at);
  }
  std::sort(by_use.begin(), by_use.end());
  for (const auto& [recency, at] : by_use) enter_orders(at);
}

}  // namespace mk::store
