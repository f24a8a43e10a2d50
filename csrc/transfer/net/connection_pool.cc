#include "transfer/net/connection_pool.h"

#include <chrono>

#include "common/check.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

// A member that becomes idle does not notify, as that would cost a lock per request.
constexpr std::chrono::milliseconds kLookEvery{2};

}  // namespace

void ConnectionPool::enter(Connected& member, const Limit& limit) {
  std::unique_lock lock(mutex_);
  if (member.is_in_pool_) return;
  for (check(limit); !has_room(); check(limit)) {
    if (limit.deadline.passed()) {
      throw Ended(limit.deadline.reason(
          concat(": all ", max_connections_, " connections (max_connections) are in use")));
    }
    left_.wait_for(lock, kLookEvery);
  }
  sieve_.insert(member);
  member.is_in_pool_ = true;
}

bool ConnectionPool::try_enter(Connected& member) {
  const std::lock_guard lock(mutex_);
  if (member.is_in_pool_) return true;
  if (!closed_.empty() || sieve_.size() >= max_connections_) return false;
  sieve_.insert(member);
  member.is_in_pool_ = true;
  return true;
}

bool ConnectionPool::add_express_lane() {
  if (++num_express_lanes_ <= kMaxExpressLanes) return true;
  --num_express_lanes_;
  return false;
}

void ConnectionPool::check(const Limit& limit) const {
  limit.interrupt.check();
  if (!closed_.empty()) throw Ended(closed_);
}

bool ConnectionPool::has_room() {
  if (sieve_.size() < max_connections_) return true;
  Connected* const evicted =
      sieve_.evict([](Connected& member) { return member.try_disconnect(); });
  if (evicted) evicted->is_in_pool_ = false;
  return evicted != nullptr;
}

void ConnectionPool::leave(Connected& member) {
  const std::lock_guard lock(mutex_);
  if (!member.is_in_pool_) return;
  member.is_in_pool_ = false;
  sieve_.remove(member);
  left_.notify_all();
}

void ConnectionPool::close(const ErrorReason& reason) {
  const std::lock_guard lock(mutex_);
  closed_ = reason;
  left_.notify_all();
}

size_t ConnectionPool::size() const {
  const std::lock_guard lock(mutex_);
  return sieve_.size();
}

}  // namespace mk::transfer
