#include "transfer/peer/lane.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <utility>

#include "transfer/base/error.h"
#include "transfer/gpu/gpu_fence.h"

namespace mk::transfer {
namespace {

constexpr double kConnectS = 5;  // of a non-leading lane
constexpr double kPauseS = 1;    // after a failure
constexpr std::chrono::microseconds kLookAtGpuEvery{20};

}  // namespace

void Lane::run() {
  leads_ ? lead() : run_follower();
  const ProgressLock::Hold hold(progress_lock_);
  while (!posted_.empty()) settle();  // the queue is closed: each is interrupted
  disconnect();
}

void Lane::lead() {
  while (true) {
    const JobQueue::Woken woken = queue_.wait_to_lead(idle_);
    if (woken == JobQueue::Woken::kClosed) return;
    const ProgressLock::Hold hold(progress_lock_);
    if (woken == JobQueue::Woken::kIdle && posted_.empty()) disconnect();
    run_dry();
    if (!shall_connect_.exchange(false) || channel_->connected()) continue;
    if (!pool_.try_enter(*this) || !try_connect()) pause_ = Deadline::after(kPauseS);
  }
}

void Lane::run_follower() {
  Task task;
  while (connect_follower() && queue_.wait_next(interrupt_, task)) {
    const ProgressLock::Hold hold(progress_lock_);
    if (channel_->connected()) {
      begin(task);
      run_dry();
    } else {  // the pool closed its connection: it must not wait for another with work in hand
      queue_.fail(task, interrupt_, {}, Retry::kFree);
    }
  }
}

void Lane::run_dry() {
  while (true) {
    Task task;
    while (posted_.size() < channel_->window() &&
           queue_.next(leads_, interrupt_, posted_.empty(), task)) {
      begin(task);
    }
    if (posted_.empty()) return;
    settle();
    if (!leads_ && posted_.empty() && !channel_->connected()) return;  // as above
  }
}

void Lane::close() {
  const ProgressLock::Hold hold(progress_lock_);
  channel_->close();
  pool_.leave(*this);
}

void Lane::connect(const Limit& limit) {
  const ProgressLock::Hold hold(progress_lock_);
  connect_held(limit);
}

void Lane::connect_held(const Limit& limit) {
  if (channel_->is_pooled()) pool_.enter(*this, limit);
  channel_->connect(limit);
  if (was_connected_) counters_.num_reconnects += 1;
  was_connected_ = true;
}

bool Lane::try_connect() try {
  connect_held({Deadline::after(kConnectS), interrupt_});
  return true;
} catch (const std::exception& error) {
  count_failure(error);
  disconnect();
  return false;
}

void Lane::disconnect() {
  channel_->disconnect();
  pool_.leave(*this);
}

// An idle lane would hold on to a dead peer's resources until its next task: open GPU memory, which
// is freed only when no one has it open.
void Lane::leave_if_lost() {
  const ProgressLock::Hold hold(progress_lock_, std::try_to_lock);
  if (hold && posted_.empty() && !channel_->connected()) disconnect();
}

bool Lane::try_disconnect() {
  const ProgressLock::Hold hold(progress_lock_, std::try_to_lock);
  if (!hold || !posted_.empty() || (leads_ && !queue_.may_rest())) return false;
  channel_->disconnect();
  return true;
}

void Lane::connect_soon() {
  {
    const ProgressLock::Hold hold(progress_lock_, std::try_to_lock);
    if (!hold || channel_->connected() || !pause_.passed()) return;
    shall_connect_ = true;
  }
  queue_.wake_lead();
}

bool Lane::begin_in_caller(const TicketRef& ticket, uint64_t max_piece_bytes) {
  if (!queue_.idle())
    return false;  // its driver shall not find the progress lock taken for a moment
  const ProgressLock::Hold hold(progress_lock_, std::try_to_lock);
  if (!hold || !posted_.empty() || !driven_->can_drive(ticket->request())) return false;
  Task task;
  if (!channel_->connected() || !queue_.push_and_take(ticket, max_piece_bytes, interrupt_, task)) {
    return false;
  }
  ticket->leave_to_caller();
  begin(task, /*connects=*/false);
  return true;
}

bool Lane::drive(const Ticket& ticket, const Deadline& until, bool polls) {
  {
    const ProgressLock::Hold hold(progress_lock_, std::try_to_lock);
    if (hold) {
      if (posted_.empty()) return false;  // it is done
      const bool is_sooner = until.at() < ticket.deadline().at();
      if (polls ? driven_->is_ready() : wait_ready(is_sooner ? until : ticket.deadline())) settle();
      if (posted_.empty()) return false;
      if (polls) return true;
    }
  }
  queue_.wake_lead();  // who holds the lock may not continue it
  return false;
}

// Whether settle() will not block.
bool Lane::wait_ready(const Deadline& until) {
  bool for_all = false;  // whether the channel wakes it only for the whole response
  const bool is_ready = wait_ready(until, for_all);
  if (for_all) driven_->wait_for_any();
  return is_ready;
}

bool Lane::wait_ready(const Deadline& until, bool& for_all) {
  const auto spin_until = std::min(Deadline::Clock::now() + driven_->spin(), until.at());
  pollfd polled[] = {{driven_->ready_fd(), POLLIN, 0},
                     {interrupt_.fd(), POLLIN, 0},
                     {progress_lock_.wanted_fd(), POLLIN, 0}};
  while (true) {
    const bool spins = Deadline::Clock::now() < spin_until;
    const int num_ready = poll(polled, 3, spins ? 0 : until.poll_ms());
    if (num_ready > 0) {
      if (polled[1].revents) return true;
      if (polled[2].revents) return false;
      if (driven_->is_ready()) return true;
      if (for_all) return false;  // it has ended, or there is no room for more
      for_all = driven_->wait_for_all();
      if (!for_all) return false;
    }
    if (num_ready < 0 && errno != EINTR) return false;
    if (!spins && until.passed()) return false;
  }
}

void Lane::count(const Work& work, const Outcome& outcome) {
  if (!outcome.is_counted) count_bytes(work.request->writes(), outcome.num_bytes);
}

void Lane::count_bytes(bool written, uint64_t num_bytes) {
  if (num_bytes == 0) return;
  (written ? counters_.num_bytes_written : counters_.num_bytes_read) += num_bytes;
  counters_.num_pieces += 1;
}

void Lane::count_failure(const std::exception& error) {
  if (!dynamic_cast<const Ended*>(&error)) counters_.num_failures += 1;
}

bool Lane::connect_follower() {
  while (queue_.wait_for_pieces(interrupt_)) {
    {
      const ProgressLock::Hold hold(progress_lock_);
      if (channel_->connected() || try_connect()) return true;
    }
    queue_.pause(kPauseS);
  }
  return false;
}

Limit Lane::limit_of(const Task& task) { return {task.job->ticket()->deadline(), interrupt_}; }

void Lane::begin(const Task& task, bool connects) {
  visited.store(true, std::memory_order_relaxed);
  const bool waits = task.job->request().after != nullptr;
  while (waits && !posted_.empty()) settle();  // posted works shall not wait for a GPU, too
  const bool first = posted_.empty();
  try {
    posted_.emplace_back(task, own_regions_, interrupt_);
  } catch (const Refused& refused) {
    return fail(task, refused.reason(), Retry::kNo);
  } catch (const std::bad_alloc& error) {
    return fail(task, reason_of(error), Retry::kNo);
  }
  try {
    const Limit limit = limit_of(task);
    if (waits) wait_for_gpu(task);
    if (connects && first && !channel_->connected()) connect_held(limit);
    channel_->post(task.work, limit);
  } catch (const Inaccessible& fault) {  // this work's memory: the others are retried
    lose(Failure(fault.of("local ")), &posted_.back());
  } catch (const std::exception& error) {
    lose(error);
  }
}

void Lane::wait_for_gpu(const Task& task) {
  const Limit limit = limit_of(task);
  while (!task.job->request().after->passed()) {
    limit.check();
    std::this_thread::sleep_for(kLookAtGpuEvery);
  }
}

void Lane::settle() {
  const Task& task = posted_.front().task;
  try {
    const Outcome outcome = channel_->finish(limit_of(task));
    const Task done = task;
    posted_.pop_front();  // unpins: a caller that waits for the ticket may deregister
    count(done.work, outcome);
    queue_.finish(done, interrupt_, outcome);
  } catch (const std::exception& error) {
    lose(error);
  }
}

// What was posted is void, whichever work caused it. If it is known which one did, the others are
// retried.
void Lane::lose(const std::exception& error, const Posted* culprit) {
  while (!posted_.empty() && channel_->has_outcome()) settle();  // these are not void
  uint64_t num_bytes = channel_->num_bytes_so_far();             // of the first
  disconnect();
  count_failure(error);
  const bool lost = dynamic_cast<const LinkDown*>(&error) != nullptr;
  const bool ended = dynamic_cast<const Ended*>(&error) != nullptr;  // a limit
  const ErrorReason reason = reason_of(error);
  const bool is_alone = posted_.size() == 1;
  for (const auto& lane : lanes_) {
    if (!ended && lane.get() != this) lane->leave_if_lost();
  }
  while (!posted_.empty()) {
    const Task task = posted_.front().task;
    const bool is_other = culprit && culprit != &posted_.front();
    posted_.pop_front();
    const Deadline& deadline = task.job->ticket()->deadline();
    // What it was waiting for is more than that it has waited.
    const bool is_told = is_alone && ended && reason.kind == FailureKind::kExhausted;
    if (deadline.passed()) {
      fail(task, is_told ? reason : deadline.reason(), Retry::kNo, num_bytes);
    } else if (ended || is_other) {
      fail(task, reason, Retry::kFree, num_bytes);
    } else {
      fail(task, reason, lost ? Retry::kCounted : Retry::kNo, num_bytes);
    }
    num_bytes = 0;
  }
}

void Lane::fail(const Task& task, const ErrorReason& reason, Retry retry, uint64_t num_bytes) {
  const auto count = [&] { count_bytes(task.work.request->writes(), num_bytes); };
  if (queue_.fail(task, interrupt_, reason, retry, num_bytes, count)) counters_.num_retries += 1;
}

}  // namespace mk::transfer
