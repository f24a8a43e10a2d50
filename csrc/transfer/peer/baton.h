// Baton: which thread drives a lane: the lane's own, or that of a caller that found it idle and so
// avoids the detour through the other thread.
//
//   if (const Baton::Hold hold(baton, std::try_to_lock); hold) ...   // a caller
//   const Baton::Hold hold(baton);   // the lane's own: a caller that waits with it lets go at once
//
// Layer: transfer. Thread-safe. A caller that holds it and waits also polls wanted_fd().
#pragma once

#include <mutex>

#include "transfer/base/limit.h"

namespace mk::transfer {

class Baton {
 public:
  class Hold {
   public:
    explicit Hold(Baton& baton) : lock_(baton.mutex_, std::try_to_lock) {
      if (lock_) return;
      baton.wanted_.signal("the lane's own thread");
      lock_.lock();
      baton.wanted_.clear();
    }
    Hold(Baton& baton, std::try_to_lock_t) : lock_(baton.mutex_, std::try_to_lock) {}
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
