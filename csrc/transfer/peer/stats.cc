#include "transfer/peer/stats.h"

namespace mk::transfer {

// The returned reference has a separate owner, whose destruction ends the use.
CountersRef Stats::enter(const std::string& peer, Transport transport) {
  const Key key{peer, transport};
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[key];
  if (entry.num_users++ == 0 && entry.left_at != 0) --num_left_;
  return {entry.counters.get(), [key, self = shared_from_this()](void*) { self->leave(key); }};
}

std::vector<Stats::Row> Stats::table() const {
  const std::lock_guard lock(mutex_);
  std::vector<Row> rows;
  for (const auto& [key, entry] : entries_) rows.push_back({key.first, key.second, entry.counters});
  return rows;
}

void Stats::leave(const Key& key) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_.at(key);
  if (--entry.num_users > 0) return;
  entry.left_at = ++num_departures_;
  if (++num_left_ > kMaxLeft) forget_one();
}

void Stats::forget_one() {
  auto oldest = entries_.end();
  for (auto item = entries_.begin(); item != entries_.end(); ++item) {
    const Entry& entry = item->second;
    if (entry.num_users > 0 || entry.left_at == 0) continue;  // or it is the others' row
    if (oldest == entries_.end() || entry.left_at < oldest->second.left_at) oldest = item;
  }
  entries_[{kOtherPeers, oldest->first.second}].counters->add(*oldest->second.counters);
  entries_.erase(oldest);
  --num_left_;
}

}  // namespace mk::transfer
