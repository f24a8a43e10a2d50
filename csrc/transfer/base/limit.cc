#include "transfer/base/limit.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "common/check.h"

namespace mk::transfer {
namespace {

constexpr double kLongestS = 1e8;  // three years: avoids integer overflow in the clock
constexpr int64_t kLongestPollMs = 3600 * 1000;

}  // namespace

Deadline Deadline::after(double seconds) {
  Deadline deadline;
  const std::chrono::duration<double> wait(std::min(seconds, kLongestS));
  deadline.at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
  deadline.seconds_ = seconds;
  return deadline;
}

int Deadline::poll_ms() const {
  if (at_ == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, kLongestPollMs));
}

ErrorReason Deadline::reason(const std::string& waited_for) const {
  return {concat("deadline of ", seconds_, " s passed", waited_for), FailureKind::kTimedOut};
}

Interrupt::Interrupt() : event_(MK_SYSCALL(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {}

void Interrupt::signal(const ErrorReason& reason) {
  const std::lock_guard lock(mutex_);
  if (signalled_) return;
  reason_ = reason;
  signalled_ = true;
  eventfd_write(event_.get(), 1);
}

void Interrupt::clear() {
  if (!signalled_) return;
  const std::lock_guard lock(mutex_);
  if (!signalled_) return;
  eventfd_t count;
  eventfd_read(event_.get(), &count);
  signalled_ = false;
}

void Interrupt::check() const {
  if (!signalled_) return;
  const std::lock_guard lock(mutex_);
  throw Ended(reason_);
}

void Limit::check() const {
  interrupt.check();
  if (deadline.passed()) throw Ended(deadline.reason());
}

short wait_ready(int fd, short events, const Limit& limit) {
  pollfd polled[] = {{fd, events, 0}, {limit.interrupt.fd(), POLLIN, 0}};
  const int num_ready = poll(polled, 2, limit.deadline.poll_ms());
  if (num_ready < 0 && errno != EINTR) throw SystemError(errno, "poll");
  limit.check();
  return num_ready > 0 ? polled[0].revents : 0;
}

}  // namespace mk::transfer
