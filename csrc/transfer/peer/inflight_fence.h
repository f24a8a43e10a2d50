// InflightFence: orders the requests in a peer's queue after those that are in flight outside it,
// on express lanes (express_lanes.h): it counts both those in flight and those in the queue that
// wait.
//
//   InflightFence::Entry entry(fence);   // a request outside the queue; once begun, keep()
//   fence.leave();                       // once that is over
//   InflightFence::Wait wait(fence);     // one in the queue, until wait.is_over() or it is gone
//
// Layer: transfer. Thread-safe. None enters while one waits, so that it waits only for those that
// have begun before.
#pragma once

#include <atomic>
#include <functional>
#include <utility>

namespace mk::transfer {

class InflightFence {
 public:
  // Called once nothing that a request in the queue may wait for is in flight.
  explicit InflightFence(std::function<void()> when_over) : when_over_(std::move(when_over)) {}

  bool idle() const { return num_in_flight_ == 0; }

  void leave() {
    if (--num_in_flight_ == 0 && num_waiting_ > 0) when_over_();
  }

  class Entry {
   public:
    explicit Entry(InflightFence& fence) : fence_(fence), entered_(fence.enter()) {}
    Entry(const Entry&) = delete;
    ~Entry() {
      if (entered_) fence_.leave();
    }
    explicit operator bool() const { return entered_; }
    void keep() { entered_ = false; }  // leave() follows

   private:
    InflightFence& fence_;
    bool entered_;
  };

  class Wait {
   public:
    explicit Wait(InflightFence& fence) : fence_(fence) { ++fence_.num_waiting_; }
    Wait(const Wait&) = delete;
    ~Wait() { --fence_.num_waiting_; }
    bool is_over() const { return fence_.idle(); }

   private:
    InflightFence& fence_;
  };

 private:
  bool enter() {
    ++num_in_flight_;
    if (num_waiting_ == 0) return true;  // else it sees this one, or this one sees it
    leave();
    return false;
  }

  const std::function<void()> when_over_;
  std::atomic<int> num_in_flight_{0};
  std::atomic<int> num_waiting_{0};
};

}  // namespace mk::transfer
