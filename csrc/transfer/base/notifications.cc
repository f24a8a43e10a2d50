#include "transfer/base/notifications.h"

#include <utility>

#include "common/check.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kMaxQueuedBytes = 64ull << 20;
constexpr uint64_t kOverheadBytes = 512;  // counted for each notification, even an empty one

uint64_t cost(const Notification& notification) {
  return notification.bytes.size() + kOverheadBytes;
}

}  // namespace

void NotificationQueue::push(const std::string& peer, std::string bytes) {
  const std::lock_guard lock(mutex_);
  if (refuses_) throw Refused("the peer receives no notifications any more");
  Notification notification{peer, std::move(bytes)};
  if (num_bytes_ + cost(notification) > kMaxQueuedBytes) {
    throw Refused(ErrorReason("the peer's notification queue is full", FailureKind::kBusy));
  }
  num_bytes_ += cost(notification);
  queue_.push_back(std::move(notification));
  arrived_.notify_one();
}

std::vector<Notification> NotificationQueue::take(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  arrived_.wait_until(lock, deadline.at(), [this] { return closed_ || !queue_.empty(); });
  MK_CHECK(!closed_, "receive_notifications: the engine is closed");
  num_bytes_ = 0;
  return std::exchange(queue_, {});
}

void NotificationQueue::accept() {
  const std::lock_guard lock(mutex_);
  refuses_ = false;
}

std::vector<Notification> NotificationQueue::refuse() {
  const std::lock_guard lock(mutex_);
  MK_CHECK(!closed_, "refuse_notifications: the engine is closed");
  refuses_ = true;
  num_bytes_ = 0;
  return std::exchange(queue_, {});
}

void NotificationQueue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  arrived_.notify_all();
}

}  // namespace mk::transfer
