#include "transfer/net/links.h"

#include <iterator>

#include "transfer/base/error.h"
#include "transfer/wire/reject_reason.h"

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
  const auto item = use(id);
  Entry& entry = item->second;
  bool is_old = epoch <= entry.epoch;
  if (!is_old) {
    entry.epoch = epoch;
    if (entry.inside) entry.inside->signal("the peer has connected anew");
    left_.notify_all();  // to waiters of lower epochs
    left_.wait_until(lock, limit.deadline.at(),
                     [&] { return !entry.inside || entry.epoch != epoch; });
    is_old = entry.epoch != epoch;
  }
  if (is_old || entry.inside) {
    release(item);
    throw Rejected(is_old ? RejectReason::kOldEpoch : RejectReason::kStillBusy);
  }
  entry.inside = &interrupt;
  entry.inside_epoch = epoch;
  return {*this, item};
}

void Links::fence(const LinkId& id, uint64_t epoch, const Limit& limit) {
  std::unique_lock lock(mutex_);
  const auto item = use(id);
  Entry& entry = item->second;
  if (entry.epoch < epoch) {
    entry.epoch = epoch;
    left_.notify_all();
  }
  // A later connection may also wait for the lost one to leave, or may be inside already.
  const auto has_left = [&] { return !entry.inside || entry.inside_epoch > epoch; };
  if (!has_left()) entry.inside->signal("the peer has lost this connection");
  const bool in_time = left_.wait_until(lock, limit.deadline.at(), has_left);
  release(item);
  if (!in_time) {
    throw Refused({"the connection that was lost has not ended in time", FailureKind::kBusy});
  }
}

void Links::leave(Entries::iterator item) {
  const std::lock_guard lock(mutex_);
  item->second.inside = nullptr;
  release(item);
  left_.notify_all();
}

Links::Entries::iterator Links::use(const LinkId& id) {
  auto item = entries_.find(id);
  if (item == entries_.end()) {
    if (entries_.size() >= kMaxEntries && !idle_.empty()) {
      entries_.erase(idle_.front());
      idle_.pop_front();
    }
    idle_.push_back(id);
    item = entries_.try_emplace(id).first;
    item->second.place = std::prev(idle_.end());
  }
  if (item->second.num_users++ == 0) used_.splice(used_.end(), idle_, item->second.place);
  return item;
}

void Links::release(Entries::iterator item) {
  if (--item->second.num_users == 0) idle_.splice(idle_.end(), used_, item->second.place);
}

}  // namespace mk::transfer
