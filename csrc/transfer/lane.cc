#include "transfer/lane.h"

#include <utility>

#include "transfer/error.h"

namespace mk::transfer {
namespace {

constexpr double kConnectS = 5;  // of a lane beside the leading one
constexpr double kPauseS = 1;    // after it could not

}  // namespace

void Lane::run() {
  while (true) {
    if (!leads_ && posted_.empty() && !connect_beside()) break;
    Task task;
    while (posted_.size() < channel_->window() &&
           queue_.next(leads_, interrupt_, posted_.empty(), task)) {
      begin(task);
    }
    if (!posted_.empty()) {
      settle();
    } else if (queue_.closed()) {
      break;
    }
  }
  channel_->disconnect();
}

bool Lane::connect_beside() {
  while (queue_.wait_for_pieces(interrupt_)) {
    if (channel_->connected()) return true;
    try {
      channel_->connect({Deadline::after(kConnectS), interrupt_});
    } catch (const std::exception&) {
      channel_->disconnect();
      queue_.pause(kPauseS);
    }
  }
  return false;
}

Limit Lane::limit_of(const Task& task) const {
  return {task.job->ticket()->deadline(), interrupt_};
}

void Lane::begin(const Task& task) {
  const bool first = posted_.empty();
  try {
    posted_.emplace_back(task, own_regions_, interrupt_);
  } catch (const Refused& refused) {
    return queue_.fail(task, interrupt_, refused.what(), Retry::kNo);
  }
  try {
    const Limit limit = limit_of(task);
    if (first && !channel_->connected()) channel_->connect(limit);
    channel_->post(task.work, limit, interrupt_);
  } catch (const std::exception& error) {
    lose(error);
  }
}

void Lane::settle() {
  const Task& task = posted_.front().task;
  try {
    const Outcome outcome = channel_->finish(limit_of(task));
    const Task done = task;
    posted_.pop_front();  // unpins: whoever waits for the ticket may deregister
    queue_.finish(done, interrupt_, outcome);
  } catch (const std::exception& error) {
    lose(error);
  }
}

// What was posted is void, whosever fault it was: the others' works are tried again.
void Lane::lose(const std::exception& error) {
  channel_->disconnect();
  const bool lost = dynamic_cast<const LinkDown*>(&error) != nullptr;
  const bool ended = dynamic_cast<const Ended*>(&error) != nullptr;  // by someone's limit
  const std::string cause = error.what();
  while (!posted_.empty()) {
    const Task task = posted_.front().task;
    posted_.pop_front();
    const Deadline& deadline = task.job->ticket()->deadline();
    if (deadline.passed()) {
      queue_.fail(task, interrupt_, deadline.cause(), Retry::kNo);
    } else if (ended) {
      queue_.fail(task, interrupt_, cause, Retry::kFree);
    } else {
      queue_.fail(task, interrupt_, cause, lost ? Retry::kCounted : Retry::kNo);
    }
  }
}

}  // namespace mk::transfer
