// Reasons to end a wait: a deadline that passes, or an interrupt.
//
//   Interrupt interrupt;
//   const Limit limit{Deadline::after(30.0), interrupt};
//   socket.receive(data, num_bytes, limit);   // throws Ended when either happens
//
// Layer: transfer.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

#include "common/fd.h"
#include "transfer/base/error.h"

namespace mk::transfer {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(double seconds);
  static Deadline never() { return {}; }

  bool passed() const { return Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }
  double left_s() const { return std::chrono::duration<double>(at_ - Clock::now()).count(); }
  int poll_ms() const;  // what is left, for poll(2): rounded up, so that it has passed after
  // "deadline of 2.5 s passed", and what was waited for.
  ErrorReason reason(const std::string& waited_for = "") const;

 private:
  Clock::time_point at_ = Clock::time_point::max();
  double seconds_ = 0;
};

// Wakes a thread out of poll(2) from another thread. Stays signalled until cleared.
class Interrupt {
 public:
  Interrupt();

  void signal(const ErrorReason& reason);  // the first reason counts; never blocks
  void signal(const char* why) { signal({why, FailureKind::kClosed}); }  // no caller is told of it
  void clear();
  bool signalled() const { return signalled_; }
  void check() const;                      // throws Ended(reason) once signalled
  int fd() const { return event_.get(); }  // readable once signalled

 private:
  Fd event_;
  std::atomic<bool> signalled_{false};
  mutable std::mutex mutex_;
  ErrorReason reason_;
};

struct Limit {
  Deadline deadline;
  Interrupt& interrupt;  // of whoever works within the limit; what it uses may signal it

  void check() const;  // throws Ended
};

// Waits until `fd` is ready for one of `events` (POLLIN, POLLOUT) and returns which; 0: woken
// early, call again. Throws Ended at the limit.
short wait_ready(int fd, short events, const Limit& limit);

}  // namespace mk::transfer
