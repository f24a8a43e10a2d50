#include "transfer/peer/job_queue.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "common/check.h"

namespace mk::transfer {

namespace {

// A request that was left to a caller is picked up after one to two of these periods, if it is
// still there. So callers need not wake a thread at each request. After a period without requests
// the thread sleeps again.
constexpr std::chrono::milliseconds kLookEvery{1};

constexpr size_t kMaxLookedAt = 16;  // for whose they are

}  // namespace

bool JobQueue::push(TicketRef ticket, uint64_t max_piece_bytes, bool defer, InflightFence* after) {
  std::unique_lock lock(mutex_);
  MK_CHECK(!closed_, ticket->request().op, ": peer must be open, got the closed ", peer_name_);
  const bool is_only = !has_of(ticket->maker());
  jobs_.push_back(std::make_shared<Job>(std::move(ticket), ++num_pushed_, max_piece_bytes));
  Job& job = *jobs_.back();
  if (after) job.come_after(*after);
  const bool checks_first = job.has_pieces(), is_for_others = concerns_others(job);
  if (defer && is_only && !checks_first) {
    watch();
    return false;
  }
  lead_woken_ = true;
  lock.unlock();  // else who wakes up waits for it at once
  lead_.notify_one();
  if (is_for_others && !checks_first) others_.notify_all();  // else next() wakes them
  return is_for_others;
}

bool JobQueue::push_and_take(const TicketRef& ticket, uint64_t max_piece_bytes, Interrupt& carrier,
                             Task& task) {
  const std::lock_guard lock(mutex_);
  if (closed_ || !jobs_.empty()) return false;
  carrier.clear();
  jobs_.push_back(std::make_shared<Job>(ticket, ++num_pushed_, max_piece_bytes));
  try {
    take(Taker::kLead, carrier, task);
  } catch (const std::bad_alloc&) {
    jobs_.pop_back();
    throw;
  }
  watch();
  return true;
}

void JobQueue::watch() {
  if (!watches_) lead_.notify_one();
  watches_ = true;
}

JobQueue::Woken JobQueue::wait_to_lead(std::optional<std::chrono::seconds> idle) {
  std::unique_lock lock(mutex_);
  while (!closed_ && !lead_woken_) {
    const uint64_t seen = num_pushed_;
    if (!watches_ && !idle) {
      lead_.wait(lock);
    } else if (!watches_) {
      if (lead_.wait_for(lock, *idle) == std::cv_status::timeout && jobs_.empty()) {
        return closed_ ? Woken::kClosed : Woken::kIdle;
      }
    } else if (lead_.wait_for(lock, kLookEvery) == std::cv_status::timeout) {
      watches_ = num_pushed_ != seen;
      if (!jobs_.empty() && jobs_.front()->id() <= seen) return Woken::kForWork;
    }
  }
  lead_woken_ = false;
  return closed_ ? Woken::kClosed : Woken::kForWork;
}

void JobQueue::wake_lead() {
  const std::lock_guard lock(mutex_);
  wake_lead_locked();
}

void JobQueue::wake_all() {
  const std::lock_guard lock(mutex_);
  wake_lead_locked();
  others_.notify_all();
}

void JobQueue::wake_lead_locked() {
  lead_woken_ = true;
  lead_.notify_one();
}

bool JobQueue::concerns_others(const Job& job) const {
  return job.has_pieces() || (job.spreads() && jobs_.size() > 1);
}

bool JobQueue::idle() {
  const std::lock_guard lock(mutex_);
  return jobs_.empty() && !closed_;
}

bool JobQueue::may_rest() {
  const std::lock_guard lock(mutex_);
  return !closed_ && (jobs_.empty() || jobs_.front()->held());
}

bool JobQueue::has_mine() {
  const std::lock_guard lock(mutex_);
  return has_of(std::this_thread::get_id());
}

bool JobQueue::has_only_others() {
  const std::lock_guard lock(mutex_);
  return !closed_ && !jobs_.empty() && !has_of(std::this_thread::get_id());
}

bool JobQueue::has_of(std::thread::id maker) const {
  if (jobs_.size() > kMaxLookedAt) return true;
  return std::any_of(jobs_.begin(), jobs_.end(),
                     [&](const JobRef& job) { return job->ticket()->maker() == maker; });
}

bool JobQueue::next(bool leads, Interrupt& carrier, bool idle, Task& task) {
  std::unique_lock lock(mutex_);
  if (closed_) return false;
  if (idle) carrier.clear();              // it was meant for an earlier task
  if (carrier.signalled()) return false;  // the tasks it carries must end; so would this one
  if (leads) lead_woken_ = false;
  if (!take(leads ? Taker::kLead : Taker::kFollower, carrier, task)) return false;
  lock.unlock();
  if (task.work.kind == Work::Kind::kCheck) others_.notify_all();  // to connect meanwhile
  return true;
}

bool JobQueue::take_own(const Ticket& ticket, bool pieces, Interrupt& carrier, Task& task) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [&](const JobRef& job) {
    return job->ticket()->maker() == ticket.maker();
  });
  if (closed_ || found == jobs_.end() || (*found)->ticket().get() != &ticket) return false;
  const JobRef& own = *found;
  if (own->has_pieces() && (!pieces || found != jobs_.begin())) return false;
  carrier.clear();
  if (!own->take(task.work, carrier, Taker::kWaiter, /*may_notify=*/false)) return false;
  task.job = own;
  return true;
}

bool JobQueue::wait_next(Interrupt& carrier, Task& task) {
  std::unique_lock lock(mutex_);
  if (!closed_) carrier.clear();
  while (!closed_) {
    if (take(Taker::kFollower, carrier, task)) return true;
    others_.wait(lock);
  }
  return false;
}

bool JobQueue::wait_for_pieces(Interrupt& carrier) {
  std::unique_lock lock(mutex_);
  const auto spreads = [](const JobRef& job) { return job->spreads(); };
  others_.wait(lock, [&] { return closed_ || std::any_of(jobs_.begin(), jobs_.end(), spreads); });
  if (!closed_) carrier.clear();
  return !closed_;
}

bool JobQueue::take(Taker taker, Interrupt& carrier, Task& task) {
  bool first = true, in_order = true;  // among those before it
  for (const JobRef& job : jobs_) {
    if (job->held()) return false;
    const bool may_notify = job->has_pieces() ? first : in_order;
    if (job->take(task.work, carrier, taker, may_notify)) {
      task.job = job;
      return true;
    }
    first = false;
    in_order &= job->in_order();
  }
  return false;
}

void JobQueue::finish(const Task& task, const Interrupt& carrier, const Outcome& outcome) {
  std::unique_lock lock(mutex_);
  task.job->finish(task.work, carrier, outcome);
  changed(task.job, lock);
}

bool JobQueue::fail(const Task& task, const Interrupt& carrier, const ErrorReason& reason,
                    Retry retry, uint64_t num_bytes, const std::function<void()>& count) {
  std::unique_lock lock(mutex_);
  task.job->fail(task.work, carrier, reason, retry, num_bytes);
  const bool again = task.job->reason().empty();
  if (!again && count) count();
  if (again) wake_lead_locked();  // a caller may have had it
  changed(task.job, lock);
  return again;
}

void JobQueue::changed(const JobRef& job, std::unique_lock<std::mutex>& lock) {
  const bool is_all = job->over() && jobs_.size() == 1;
  if (!job->in_order() && !is_all) {  // others may continue it, or what waited for it
    wake_lead_locked();
    others_.notify_all();
  }
  if (!job->over()) return;
  const auto found = std::find(jobs_.begin(), jobs_.end(), job);
  if (found == jobs_.end()) return;
  const JobRef over = *found;
  if (over->refused_whole() && !closed_ && over->ticket()->split_request()) {  // see coalesce.h
    *found = std::make_shared<Job>(over->ticket(), ++num_pushed_, over->max_bytes());
    wake_lead_locked();
    if (concerns_others(**found)) others_.notify_all();
    return;
  }
  jobs_.erase(found);
  const ErrorReason reason = over->reason();  // close() may stop it again
  lock.unlock();
  if (when_over_) when_over_();
  over->ticket()->finish(reason, over->num_bytes_done(), over->confirmed());
}

void JobQueue::abandon(const Ticket& ticket, const ErrorReason& reason) {
  std::unique_lock lock(mutex_);
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [&](const JobRef& job) {
    return job->ticket().get() == &ticket;
  });
  if (found == jobs_.end()) return;
  const JobRef job = *found;
  job->abandon(reason);
  wake_lead_locked();  // it may have been left alone
  changed(job, lock);
}

void JobQueue::close(const ErrorReason& reason) {
  std::unique_lock lock(mutex_);
  closed_ = true;
  lead_.notify_all();
  others_.notify_all();
  const std::deque<JobRef> jobs = jobs_;
  for (const JobRef& job : jobs) {
    if (!lock) lock.lock();
    job->stop(reason);
    changed(job, lock);
  }
}

void JobQueue::pause(double seconds) {
  std::unique_lock lock(mutex_);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!closed_ && others_.wait_until(lock, until) != std::cv_status::timeout) {
  }
}

}  // namespace mk::transfer
