// Beside: how many requests to a peer are under way beside its queue (sides.h), and how many in the
// queue must not begin before those are over.
//
//   Beside::Entry entry(beside);   // a request beside the queue; once begun, keep()
//   beside.leave();                // once that is over
//   Beside::Wait wait(beside);     // one in the queue, until wait.is_over() or it is gone
//
// Layer: transfer. Thread-safe. None enters while one waits, so that it waits only for those that
// have begun before.
#pragma once

#include <atomic>
#include <functional>
#include <utility>

namespace mk::transfer {

class Beside {
 public:
  // Called once nothing that a request in the queue may wait for is under way.
  explicit Beside(std::function<void()> when_over) : when_over_(std::move(when_over)) {}

  bool idle() const { return num_under_way_ == 0; }

  void leave() {
    if (--num_under_way_ == 0 && num_waiting_ > 0) when_over_();
  }

  class Entry {
   public:
    explicit Entry(Beside& beside) : beside_(beside), entered_(beside.enter()) {}
    Entry(const Entry&) = delete;
    ~Entry() {
      if (entered_) beside_.leave();
    }
    explicit operator bool() const { return entered_; }
    void keep() { entered_ = false; }  // leave() follows

   private:
    Beside& beside_;
    bool entered_;
  };

  class Wait {
   public:
    explicit Wait(Beside& beside) : beside_(beside) { ++beside_.num_waiting_; }
    Wait(const Wait&) = delete;
    ~Wait() { --beside_.num_waiting_; }
    bool is_over() const { return beside_.idle(); }

   private:
    Beside& beside_;
  };

 private:
  bool enter() {
    ++num_under_way_;
    if (num_waiting_ == 0) return true;  // else it sees this one, or this one sees it
    leave();
    return false;
  }

  const std::function<void()> when_over_;
  std::atomic<int> num_under_way_{0};
  std::atomic<int> num_waiting_{0};
};

}  // namespace mk::transfer
