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

void Lane::connect(const Limit& limit) {
  channel_->connect(limit);
  if (was_connected_) counters_.num_reconnects += 1;
  was_connected_ = true;
}

void Lane::count(const Work& work, const Outcome& outcome) {
  if (outcome.is_counted) return;
  (work.request->writes() ? counters_.num_bytes_written : counters_.num_bytes_read) +=
      outcome.num_bytes;
  if (outcome.num_bytes > 0) counters_.num_pieces += 1;
}

void Lane::count_failure(const std::exception& error) {
  if (!dynamic_cast<const Ended*>(&error)) counters_.num_failures += 1;
}

bool Lane::connect_beside() {
  while (queue_.wait_for_pieces(interrupt_)) {
    if (channel_->connected()) return true;
    try {
      connect({Deadline::after(kConnectS), interrupt_});
    } catch (const std::exception& error) {
      count_failure(error);
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
    return fail(task, refused.what(), Retry::kNo);
  }
  try {
    const Limit limit = limit_of(task);
    if (first && !channel_->connected()) connect(limit);
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
    count(done.work, outcome);
    queue_.finish(done, interrupt_, outcome);
  } catch (const std::exception& error) {
    lose(error);
  }
}

// What was posted is void, whosever fault it was: the others' works are tried again.
void Lane::lose(const std::exception& error) {
  channel_->disconnect();
  count_failure(error);
  const bool lost = dynamic_cast<const LinkDown*>(&error) != nullptr;
  const bool ended = dynamic_cast<const Ended*>(&error) != nullptr;  // by someone's limit
  const std::string cause = error.what();
  while (!posted_.empty()) {
    const Task task = posted_.front().task;
    posted_.pop_front();
    const Deadline& deadline = task.job->ticket()->deadline();
    if (deadline.passed()) {
      fail(task, deadline.cause(), Retry::kNo);
    } else if (ended) {
      fail(task, cause, Retry::kFree);
    } else {
      fail(task, cause, lost ? Retry::kCounted : Retry::kNo);
    }
  }
}

void Lane::fail(const Task& task, const std::string& cause, Retry retry) {
  if (queue_.fail(task, interrupt_, cause, retry)) counters_.num_retries += 1;
}

}  // namespace mk::transfer
