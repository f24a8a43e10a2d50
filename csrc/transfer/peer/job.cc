#include "transfer/peer/job.h"

#include <algorithm>
#include <new>
#include <utility>

#include "transfer/wire/wire.h"

namespace mk::transfer {
namespace {

// Per work: enough to survive some lost connections, and few enough to report a dead peer soon.
// They are not counted per request, as a request loses all of its lanes at once.
constexpr int kMaxLosses = 3;

// Per piece: less is moved before another thread has woken up.
constexpr uint64_t kMinSpreadBytes = 256ull << 10;

// The reason belongs to another request and must not be mistaken for this one's.
constexpr char kOnItsWay[] = "given up while the notification was on its way: ";

bool fits_one_piece(const Request& request, uint64_t max_bytes) {
  return request.num_ranges() <= kMaxBatchRanges && request.num_bytes <= max_bytes;
}

}  // namespace

Job::Job(TicketRef ticket, uint64_t id, uint64_t max_bytes)
    : ticket_(std::move(ticket)),
      request_(ticket_->request()),
      id_(id),
      max_bytes_(max_bytes),
      cutter_(request_, max_bytes),
      has_pieces_(!fits_one_piece(request_, max_bytes)),
      spreads_(has_pieces_ || (request_.num_bytes > kMinSpreadBytes && !request_.notify)),
      checked_(!has_pieces_),
      notified_(!request_.notify) {}

bool Job::take(Work& work, Interrupt& carrier, Taker taker, bool may_notify) {
  const bool leads = taker == Taker::kLead;
  if (!reason_.empty() || (taker == Taker::kFollower && !spreads_)) return false;
  work = {Work::Kind::kMove, &request_, id_, {}, false, &notify_begun_};
  if (!checked_) {
    if (check_taken_ || taker == Taker::kFollower) return false;
    if (!take_again(work)) work.kind = Work::Kind::kCheck;
    check_taken_ = true;
  } else if (has_data()) {
    work.with_notify = !has_pieces_ && !notified_;
    if (work.with_notify && !may_notify) return false;
    if (!take_again(work)) cutter_.next(work.piece);
    notify_taken_ |= work.with_notify;
  } else {
    if (notified_ || notify_taken_ || !carriers_.empty() || !leads || !may_notify) return false;
    if (!take_again(work)) work.kind = Work::Kind::kNotify;
    notify_taken_ = true;
  }
  is_shared_ |= !leads;
  carriers_.push_back(&carrier);
  return true;
}

void Job::finish(const Work& work, const Interrupt& carrier, const Outcome& outcome) {
  release(carrier);
  num_bytes_done_ += outcome.num_bytes;
  if (!outcome.refusal.empty()) {
    refused_ = reason_.empty();
    stop(outcome.refusal);
  } else if (work.kind == Work::Kind::kCheck) {
    checked_ = true;
  }
  if (work.with_notify || work.kind == Work::Kind::kNotify) notified_ = true;
  confirm(work, outcome.num_bytes, !outcome.refusal.empty());
}

void Job::fail(const Work& work, const Interrupt& carrier, const ErrorReason& reason, Retry retry,
               uint64_t num_bytes) {
  release(carrier);
  try_again(work, reason, retry);
  if (reason_.empty()) return;
  num_bytes_done_ += num_bytes;
  confirm(work, num_bytes, /*failed=*/true);
}

void Job::try_again(const Work& work, const ErrorReason& reason, Retry retry) {
  if (retry == Retry::kNo) return stop(reason);
  if (notify_begun_ && !request_.may_notify_again) {  // it must not be delivered twice
    // Another request on the connection was given up, so the kind is not its own.
    const ErrorReason lost(concat(kOnItsWay, reason.text), FailureKind::kDisconnected);
    return stop(retry == Retry::kFree ? lost : reason);
  }
  Work again = work;
  if (retry == Retry::kCounted) {
    if (lost_.empty()) lost_ = reason;
    // How it began, and where that has led.
    if (++again.num_losses > kMaxLosses) return stop({lost_.text, reason.kind});
  }
  if (work.kind == Work::Kind::kCheck) check_taken_ = false;
  if (work.kind == Work::Kind::kNotify) notify_taken_ = false;
  again_.push_back(again);
}

void Job::stop(const ErrorReason& reason) {
  if (reason_.empty()) reason_ = reason;
  for (Interrupt* carrier : carriers_) carrier->signal(reason_);
}

void Job::abandon(const ErrorReason& reason) {
  abandoned_ = true;
  stop(reason);
}

bool Job::over() const {
  if (!carriers_.empty()) return false;
  return !reason_.empty() || (checked_ && cutter_.at_end() && again_.empty() && notified_);
}

bool Job::has_data() const {
  return again_.empty() ? !cutter_.at_end() : again_.back().kind != Work::Kind::kNotify;
}

bool Job::take_again(Work& work) {
  if (again_.empty()) return false;
  work = again_.back();
  again_.pop_back();
  return true;
}

void Job::confirm(const Work& work, uint64_t num_bytes, bool failed) {
  if (!has_pieces_ && reason_.empty()) return;  // it is delivered
  if (!work.has_arrived(num_bytes, failed)) return;
  const uint64_t position = work.piece.position;
  if (!confirmed_.empty() && confirmed_.back().address + confirmed_.back().num_bytes == position) {
    confirmed_.back().num_bytes += num_bytes;
  } else {
    try {
      confirmed_.push_back({position, num_bytes});
    } catch (const std::bad_alloc&) {
      // It counts as not delivered.
    }
  }
}

void Job::release(const Interrupt& carrier) {
  carriers_.erase(std::find(carriers_.begin(), carriers_.end(), &carrier));
}

}  // namespace mk::transfer
