// ProgressLock: held by the thread that drives a lane: the lane's own, or that of a caller that
// found the lane idle and so avoids the detour through the other thread.
//
//   if (const ProgressLock::Hold hold(lock, std::try_to_lock); hold) ...   // a caller
//   const ProgressLock::Hold hold(lock);   // the lane's own: a caller that waits lets go at once
//
// Layer: transfer. Thread-safe. A caller that holds it and waits also polls wanted_fd().
#pragma once

#include <mutex>

#include "transfer/base/limit.h"

namespace mk::transfer {

class ProgressLock {
 public:
  class Hold {
   public:
    explicit Hold(ProgressLock& lock) : lock_(lock.mutex_, std::try_to_lock) {
      if (lock_) return;
      lock.wanted_.signal("the lane's own thread");
      lock_.lock();
      lock.wanted_.clear();
    }
    Hold(ProgressLock& lock, std::try_to_lock_t) : lock_(lock.mutex_, std::try_to_lock) {}
    explicit operator bool() const { return lock_.owns_lock(); }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  int wanted_fd() const { return wanted_.fd(); }

 private:
  std::mutex mutex_;
  Interrupt wanted_;
};

}  // namespace mk::transfer
