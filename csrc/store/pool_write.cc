// Writing objects to a pool, and removing them by name.
#include <algorithm>

#include "common/check.h"
#include "store/pool.h"

namespace mk::store {

PutState Pool::begin(const Key& key, uint64_t num_bytes, Writing* writing) {
  owner_.check("put", "pool");
  MK_CHECK(num_bytes <= geometry().capacity_bytes, "put: num_bytes must be at most the pool's ",
           geometry().capacity_bytes, ", got ", num_bytes);
  const Lock lock(*this);
  if (const Found found = index_.find(key); found.entry != kNone) {
    if (found.is_ready()) return PutState::kExists;
    const uint32_t row = view_.row_of(view_.entries[found.entry]);
    if (is_alive(view_.rows[row])) return PutState::kBeingWritten;
    ledger_.reap();
  }
  uint32_t at = ledger_.add(key, num_bytes, row_);
  if (at == kNone && ledger_.sweep() > 0) at = ledger_.add(key, num_bytes, row_);
  if (at == kNone) return PutState::kFull;
  const Entry& entry = view_.entries[at];
  *writing = {at, generation_of(entry.word.load()), view_.data_of(entry, num_bytes), num_bytes,
              removals_.end()};
  return PutState::kOpen;
}

Entry& Pool::checked(const char* op, const Writing& writing) const {
  owner_.check(op, "put");
  Entry& entry = view_.entries[writing.entry];
  MK_CHECK(entry.word.load() == word_of(writing.generation, State::kWriting), op,
           ": put must be open, got one that was committed or aborted");
  return entry;
}

void Pool::commit(const Writing& writing, uint64_t checksum, Retention retention,
                  uint16_t position) {
  const Lock lock(*this);
  checked("commit", writing);
  ledger_.publish(writing.entry, checksum, retention, position);
}

bool Pool::commit_unless_removed(const Writing& writing, uint64_t checksum, Retention retention,
                                 uint16_t position) {
  const Lock lock(*this);
  const Entry& entry = checked("commit", writing);
  if (removals_.include({entry.hash.load(), entry.scope.load()}, writing.removals_end)) {
    ledger_.doom(writing.entry);
    ledger_.sweep();
    return false;
  }
  ledger_.publish(writing.entry, checksum, retention, position);
  return true;
}

void Pool::abort(const Writing& writing) {
  const Lock lock(*this);
  checked("abort", writing);
  ledger_.doom(writing.entry);
  ledger_.sweep();
}

void Pool::give_up(const std::vector<Writing>& writings) noexcept {
  std::chrono::milliseconds limit{100};  // plenty, unless a process is stopped
  if (writings.empty() || owner_.forked()) return;
  {
    const std::lock_guard lock(giving_up_);
    if (has_given_up_) limit = limit.zero();  // whoever gave up those has waited, or still does
    given_up_.insert(given_up_.end(), writings.begin(), writings.end());
    has_given_up_ = true;
  }
  try {
    const Lock lock(*this, limit);
  } catch (const std::exception&) {
    // The next holder of the mutex in this process completes it, or else the death of the process.
  }
}

void Pool::end_given_up() {
  const std::lock_guard lock(giving_up_);
  for (const Writing& writing : given_up_) {
    const bool is_open =
        view_.entries[writing.entry].word.load() == word_of(writing.generation, State::kWriting);
    if (is_open) ledger_.doom(writing.entry);
  }
  given_up_.clear();
  has_given_up_ = false;
  ledger_.sweep();
}

bool Pool::remove(const Key& key, bool is_noted) {
  bool was_present = false;
  remove_each(&key, 1, &was_present, is_noted);
  return was_present;
}

void Pool::remove_each(const Key* keys, size_t count, bool* out, bool is_noted) {
  owner_.check("remove", "pool");
  const Lock lock(*this);
  for (size_t i = 0; i < count; ++i) {
    if (is_noted) removals_.note(keys[i]);
    const Found found = index_.find(keys[i]);
    out[i] = found.is_ready();
    if (out[i]) ledger_.doom(found.entry);
  }
  ledger_.sweep();
  const auto num_removed = static_cast<uint64_t>(std::count(out, out + count, true));
  view_.header->num_removed.fetch_add(num_removed, std::memory_order_relaxed);
}

bool Pool::remove_exactly(ObjectId id) {
  owner_.check("remove_exactly", "pool");
  const auto at = static_cast<uint32_t>(id - 1);
  if (id == 0 || at >= geometry().num_entries) return false;
  const Lock lock(*this);
  if (view_.entries[at].word.load() != word_of((id - 1) >> 32, State::kReady)) return false;
  ledger_.doom(at);
  ledger_.sweep();
  view_.header->num_removed.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void Pool::keep_removals() {
  owner_.check("keep_removals", "pool");
  const Lock lock(*this);
  removals_.keep();
}

void Pool::note_all_removed() {
  owner_.check("remove", "pool");
  const Lock lock(*this);
  removals_.note_all();
}

bool Pool::set_quota(const QuotaInfo& quota) {
  owner_.check("set_quota", "pool");
  const bool is_limit = quota.num_bytes || quota.num_objects;
  const Lock lock(*this);
  Quota* row = nullptr;
  for (Quota& known : view_.header->quotas) {
    const bool is_free = known.num_bytes.load() == 0 && known.num_objects.load() == 0;
    if (!is_free && known.scope.load() == quota.scope) {
      row = &known;
      break;
    }
    if (is_free && !row) row = &known;
  }
  if (!row) return !is_limit;
  row->scope.store(quota.scope);
  if (quota.num_bytes) row->num_bytes.store(quota.num_bytes);
  row->num_objects.store(quota.num_objects);
  row->num_bytes.store(quota.num_bytes);  // not before: killed in between, the row would be free
  return true;
}

std::vector<QuotaInfo> Pool::quotas() {
  owner_.check("quotas", "pool");
  const Lock lock(*this);
  std::vector<QuotaInfo> all;
  for (const Quota& known : view_.header->quotas) {
    const QuotaInfo info{known.scope.load(), known.num_bytes.load(), known.num_objects.load()};
    if (info.num_bytes || info.num_objects) all.push_back(info);
  }
  return all;
}

bool Pool::retain(const Key& key, Retention retention) {
  owner_.check("retain", "pool");
  const Lock lock(*this);
  const Found found = index_.find(key);
  if (!found.is_ready()) return false;
  ledger_.retain(found.entry, retention);
  return true;
}

void Pool::order_uses(const Key* keys, size_t count) {
  owner_.check("order_uses", "pool");
  const Lock lock(*this);
  std::vector<uint32_t> entries;
  for (size_t i = 0; i < count; ++i) {
    const Found found = index_.find(keys[i]);
    if (found.is_ready()) entries.push_back(found.entry);
  }
  ledger_.order_uses(entries);
}

uint32_t Pool::reap() {
  owner_.check("reap", "pool");
  const Lock lock(*this);
  const uint32_t num_dead = ledger_.reap();
  ledger_.sweep();
  return num_dead;
}

std::vector<ObjectInfo> Pool::scan() {
  owner_.check("scan", "pool");
  constexpr uint32_t kPart = 1 << 14;  // entries; others get their turn in between
  std::vector<ObjectInfo> objects;
  for (uint32_t begin = 0; begin < geometry().num_entries; begin += kPart) {
    const uint32_t end = std::min(begin + kPart, geometry().num_entries);
    const Lock lock(*this);
    for (uint32_t at = begin; at < end; ++at) {
      if (state_of(view_.entries[at].word.load()) == State::kReady) objects.push_back(info_of(at));
    }
  }
  return objects;
}

ObjectInfo Pool::info_of(uint32_t at) const {
  const Entry& entry = view_.entries[at];
  const uint64_t num_bytes = entry.num_bytes();
  const Retention retention = entry.retention;
  if (num_bytes > geometry().capacity_bytes || retention > Retention::kHard) {
    view_.damage.report("an object is larger than it, or has no retention");
  }
  return {{entry.hash.load(), entry.scope.load()},
          num_bytes,
          entry.recency.load(),
          std::max<uint16_t>(entry.row_or_uses.load(), 1),  // 0: a row, see publish
          entry.position(),
          retention,
          id_of(at, generation_of(entry.word.load()))};
}

PoolStats Pool::stats(std::chrono::milliseconds limit) {
  owner_.check("stats", "pool");
  const Lock lock(*this, limit);
  ledger_.sweep();
  const Header& header = *view_.header;
  const Allocator& allocator = ledger_.allocator();
  const uint64_t unit = geometry().alignment;
  PoolStats stats{};
  stats.capacity_bytes = geometry().capacity_bytes;
  stats.free_bytes = allocator.free_units() * unit;
  stats.largest_free_bytes = allocator.largest_free_units() * unit;
  stats.num_free_spans = allocator.num_free_spans();
  stats.max_objects = geometry().num_entries;
  stats.num_ready = header.num_ready;
  stats.num_writing = header.num_writing;
  stats.num_doomed = header.num_doomed;
  stats.doomed_bytes = header.doomed_units * unit;
  stats.num_repairs = header.num_rebuilds - 1;
  stats.num_pins = PinnedSet(view_).size();
  for (uint32_t row = 0; row < geometry().num_rows; ++row) {
    stats.num_processes += view_.rows[row].pid.load() != 0;
  }
  return stats;
}

}  // namespace mk::store
