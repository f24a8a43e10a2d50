#include "store/watch.h"

#include <algorithm>

namespace mk::store {

Watch::Found Watch::look() {
  pool_->owner_.check("look", "pool");
  const std::lock_guard alone(looking_);
  const Changes& changes = pool_->changes_;
  if (changes.end() == end_) return {};
  const uint32_t num_entries = pool_->geometry().num_entries;
  uint64_t begin = end_;
  if (!changes.has(begin)) {
    begin = changes.end();
    constexpr uint32_t kPart = 1 << 14;  // entries; others get their turn in between
    for (uint32_t at = 0; at < num_entries;) {
      const Pool::Lock lock(*pool_);
      for (const uint32_t end = std::min(at + kPart, num_entries); at < end; ++at) compare(at);
    }
  }
  {
    const Pool::Lock lock(*pool_);  // so that what is seen in the end is of one moment
    const uint64_t end = changes.end();
    if (end - begin < kNumChanges) {
      for (; begin != end; ++begin) {
        const uint32_t at = changes.entry(begin);
        if (at >= num_entries) pool_->view_.damage.report("its ring of changes leads out of it");
        compare(at);
      }
    } else {
      for (uint32_t at = 0; at < num_entries; ++at) compare(at);
    }
    end_ = end;
  }
  Found found;
  for (const Change& change : changed_) {
    Object& now = objects_[change.entry];
    now.has_changed = false;
    if (now.word == change.before.word) continue;
    if (change.before.word != 0) found.removed.push_back(change.before.key);
    if (now.word != 0) found.stored.push_back(now.key);
  }
  changed_.clear();
  return found;
}

// Requires the pool's mutex.
void Watch::compare(uint32_t at) {
  const Entry& entry = pool_->view_.entries[at];
  const uint64_t word = entry.word.load();
  const bool is_ready = state_of(word) == State::kReady;
  if (at >= objects_.size()) {
    if (!is_ready) return;
    objects_.resize(at + 1);
  }
  Object& object = objects_[at];
  if (object.word == (is_ready ? word : 0)) return;
  if (!object.has_changed) changed_.push_back({at, object});
  object = {};
  if (is_ready) object = {{entry.hash.load(), entry.scope.load()}, word, false};
  object.has_changed = true;
}

}  // namespace mk::store
