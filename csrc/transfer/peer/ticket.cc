#include "transfer/peer/ticket.h"

#include <algorithm>
#include <new>
#include <utility>

#include "transfer/base/error.h"
#include "transfer/peer/peer.h"
#include "transfer/request/delivered.h"

namespace mk::transfer {

Ticket::Ticket(std::weak_ptr<Peer> peer, std::string peer_name, Request request,
               const Deadline& deadline, Counted counted)
    : peer_(std::move(peer)),
      peer_name_(std::move(peer_name)),
      num_bytes_(request.num_bytes),
      deadline_(deadline),
      request_(std::move(request)),
      counted_(std::move(counted)) {}

bool Ticket::finished() {
  owner_.check("done", "ticket");
  return wait_until(Deadline::after(0), /*polls=*/true);
}

bool Ticket::is_over() {
  owner_.check("wait", "ticket");
  const std::lock_guard lock(mutex_);
  return finished_;
}

bool Ticket::wait(const Deadline& until) {
  owner_.check("wait", "ticket");
  return wait_until(until, /*polls=*/false);
}

// The first one that waits for it does this. What is not over afterwards is left to its lane. Those
// that poll may do it in turn: to wake the lane's thread would take longer than what is left.
void Ticket::drive(const Deadline& until, bool polls) {
  if (!is_with_caller_.load(std::memory_order_relaxed) || !is_with_caller_.exchange(false)) return;
  const auto peer = peer_.lock();
  if (peer && peer->drive(*this, until, polls)) is_with_caller_ = true;
}

bool Ticket::wait_until(const Deadline& until, bool polls) {
  drive(until, polls);
  {
    std::unique_lock lock(mutex_);
    const auto at = std::min(until.at(), deadline_.at());
    if (changed_.wait_until(lock, at, [this] { return finished_; })) return true;
  }
  if (!deadline_.passed()) return false;
  // The worker observes its own deadline, but this request may still be queued behind another.
  abandon(deadline_.reason());
  wait_finished();
  return true;
}

void Ticket::check() const {
  const std::lock_guard lock(mutex_);
  if (reason_.empty()) return;
  throw TransferError(peer_name_, reason_, num_bytes_done_, num_bytes_, only_notification_missing_,
                      delivered_);
}

std::optional<double> Ticket::ended_s() const {
  const std::lock_guard lock(mutex_);
  if (!finished_) return std::nullopt;
  return std::chrono::duration<double>(ended_at_.time_since_epoch()).count();
}

bool Ticket::cancel() {
  owner_.check("cancel", "ticket");
  abandon({"cancelled", FailureKind::kCancelled});
  wait_finished();
  const std::lock_guard lock(mutex_);
  return reason_.kind == FailureKind::kCancelled;
}

void Ticket::push_when_finished(std::shared_ptr<CompletionQueue> queue, uint64_t key) {
  owner_.check("await", "ticket");
  drive(Deadline::after(0), /*polls=*/false);
  const std::lock_guard lock(mutex_);
  if (finished_) {
    queue->push(key);
  } else {
    completions_.emplace_back(std::move(queue), key);
  }
}

void Ticket::abandon(const ErrorReason& reason) {
  // If the peer is gone, it has finished its tickets.
  if (const auto peer = peer_.lock()) peer->abandon(*this, reason);
}

// Short: abandoning the request has either removed it from the queue or interrupted the worker,
// which blocks only in poll(2).
void Ticket::wait_finished() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return finished_; });
}

void Ticket::finish(const ErrorReason& reason, uint64_t num_bytes_done,
                    const std::vector<Range>& confirmed) {
  std::vector<bool> delivered;
  try {
    if (!reason.empty()) delivered = whole_descriptors(request_, confirmed);
  } catch (const std::bad_alloc&) {
    // It ends without telling.
  }
  const std::lock_guard lock(mutex_);
  counted_.end(num_bytes_done, !reason.empty());  // before anyone learns that it is over
  reason_ = reason;
  num_bytes_done_ = num_bytes_done;
  delivered_ = std::move(delivered);
  const bool all = std::find(delivered_.begin(), delivered_.end(), false) == delivered_.end();
  only_notification_missing_ = request_.notify && !delivered_.empty() && all;
  request_ = {};  // the ticket may be kept for long
  finished_ = true;
  ended_at_ = std::chrono::steady_clock::now();
  changed_.notify_all();
  for (const auto& [queue, key] : completions_) queue->push(key);
  completions_.clear();
}

}  // namespace mk::transfer
