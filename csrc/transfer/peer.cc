#include "transfer/peer.h"

#include <algorithm>
#include <utility>

#include "common/thread.h"
#include "transfer/error.h"

namespace mk::transfer {

Peer::Peer(std::string name, std::unique_ptr<Channel> channel, std::shared_ptr<Endpoint> own,
           std::shared_ptr<Stats> stats)
    : name_(std::move(name)),
      transport_(channel->transport()),
      channel_(std::move(channel)),
      own_(std::move(own)),
      stats_(std::move(stats)) {}

void Peer::start(const Deadline& deadline) {
  const std::lock_guard lock(join_mutex_);
  try {
    interrupt_.check();
  } catch (const Failure& closed) {
    throw TransferError(name_, closed.what());
  }
  worker_ = start_thread([this, deadline] { work(deadline); });
}

bool Peer::wait_connected(const Deadline& until) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, until.at(), [this] { return connected_.has_value(); })) {
    return false;
  }
  if (!connected_->empty()) throw TransferError(name_, *connected_);
  return true;
}

TicketRef Peer::submit(Request request, const Deadline& deadline) {
  auto ticket = std::make_shared<Ticket>(weak_from_this(), name_, std::move(request), deadline);
  const std::lock_guard lock(mutex_);
  MK_CHECK(!closing_, "submit: peer must be open, got the closed ", name_);
  queue_.push_back(ticket);
  changed_.notify_one();
  return ticket;
}

void Peer::abandon(const Ticket& ticket, const std::string& cause) {
  TicketRef queued;
  {
    const std::lock_guard lock(mutex_);
    if (current_ == &ticket) interrupt_.signal(cause);
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [&](const TicketRef& item) { return item.get() == &ticket; });
    if (found != queue_.end()) {
      queued = std::move(*found);
      queue_.erase(found);
    }
  }
  if (queued) finish(*queued, cause, 0);
}

void Peer::close(const std::string& cause) {
  std::deque<TicketRef> pending;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    interrupt_.signal(cause);
    changed_.notify_all();
    pending.swap(queue_);
  }
  for (const TicketRef& ticket : pending) finish(*ticket, cause, 0);
  const std::lock_guard lock(join_mutex_);
  if (worker_.joinable()) worker_.join();
}

bool Peer::connect(const Deadline& deadline) {
  std::string cause;
  try {
    channel_->connect(interrupt_, deadline);
  } catch (const std::exception& error) {
    cause = error.what();
  }
  const std::lock_guard lock(mutex_);
  connected_ = cause;
  changed_.notify_all();
  return cause.empty();
}

void Peer::work(const Deadline& deadline) {
  if (!connect(deadline)) return;
  while (const TicketRef ticket = next()) run(*ticket);
  channel_->disconnect();
}

TicketRef Peer::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
  if (closing_) return nullptr;
  TicketRef ticket = std::move(queue_.front());
  queue_.pop_front();
  interrupt_.clear();
  current_ = ticket.get();
  return ticket;
}

void Peer::run(Ticket& ticket) {
  const Request& request = ticket.request_;
  uint64_t num_bytes_done = 0;
  std::string cause;
  try {
    const Pin pin = own_->regions.pin(request.regions, interrupt_);
    channel_->run(request, interrupt_, ticket.deadline(), num_bytes_done);
  } catch (const std::exception& error) {
    cause = error.what();
  }
  {
    const std::lock_guard lock(mutex_);
    current_ = nullptr;
  }
  finish(ticket, cause, num_bytes_done);
}

void Peer::finish(Ticket& ticket, const std::string& cause, uint64_t num_bytes_done) {
  stats_->record(name_, transport_, ticket.request_.direction, num_bytes_done, !cause.empty());
  ticket.finish(cause, num_bytes_done);
}

}  // namespace mk::transfer
