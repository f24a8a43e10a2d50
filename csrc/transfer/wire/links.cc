#include "transfer/wire/links.h"

#include "transfer/error.h"
#include "transfer/verdict.h"

namespace mk::transfer {
namespace {

// Links without a holder are remembered, so that a connection that was delayed in the network is
// recognized as old. Forgetting one is harmless: an initiator sends nothing before it has been
// answered.
constexpr size_t kMaxEntries = 4096;

}  // namespace

Links::Hold Links::enter(const LinkId& id, uint64_t epoch, Interrupt& interrupt,
                         const Limit& limit) {
  std::unique_lock lock(mutex_);
  if (entries_.count(id) == 0 && entries_.size() >= kMaxEntries) forget_one();
  Entry& entry = entries_[id];
  if (epoch <= entry.epoch) throw Rejected(Verdict::kOldEpoch);
  entry.epoch = epoch;
  if (entry.inside) entry.inside->signal("the peer has connected anew");
  left_.notify_all();  // waiters of lower epochs wait in vain
  ++entry.num_users;
  left_.wait_until(lock, limit.deadline.at(),
                   [&] { return !entry.inside || entry.epoch != epoch; });
  const bool is_old = entry.epoch != epoch;
  if (is_old || entry.inside) {
    --entry.num_users;
    throw Rejected(is_old ? Verdict::kOldEpoch : Verdict::kStillBusy);
  }
  entry.inside = &interrupt;
  entry.inside_epoch = epoch;
  return {*this, entry};
}

void Links::fence(const LinkId& id, uint64_t epoch, const Limit& limit) {
  std::unique_lock lock(mutex_);
  if (entries_.count(id) == 0 && entries_.size() >= kMaxEntries) forget_one();
  Entry& entry = entries_[id];
  if (entry.epoch < epoch) {
    entry.epoch = epoch;
    left_.notify_all();
  }
  // A later connection may also wait for the lost one to leave, or may be inside already.
  const auto has_left = [&] { return !entry.inside || entry.inside_epoch > epoch; };
  if (has_left()) return;
  entry.inside->signal("the peer has lost this connection");
  ++entry.num_users;
  const bool in_time = left_.wait_until(lock, limit.deadline.at(), has_left);
  --entry.num_users;
  if (!in_time) throw Refused(Cause("the connection that was lost has not ended in time", FailureKind::kBusy));
}

void Links::leave(Entry& entry) {
  const std::lock_guard lock(mutex_);
  entry.inside = nullptr;
  --entry.num_users;
  entry.left_at = ++num_departures_;
  left_.notify_all();
}

// Forgets the one that was left the longest ago.
void Links::forget_one() {
  auto oldest = entries_.end();
  for (auto item = entries_.begin(); item != entries_.end(); ++item) {
    const bool is_older = oldest == entries_.end() || item->second.left_at < oldest->second.left_at;
    if (item->second.num_users == 0 && is_older) oldest = item;
  }
  if (oldest != entries_.end()) entries_.erase(oldest);
}

}  // namespace mk::transfer
