// CallerInterrupts: Interrupts for callers that carry out requests in their own threads, one each.
//
//   if (const CallerInterrupts::Hold here(interrupts)) channel.run(work, {deadline, *here});
//
// Layer: transfer. Thread-safe. They are kept, because each is a descriptor: as many as were needed
// at once, and at most kMaxInterrupts.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/check.h"
#include "transfer/base/limit.h"

namespace mk::transfer {

class CallerInterrupts {
 public:
  class Hold {
   public:
    explicit Hold(CallerInterrupts& owner) : owner_(owner), interrupt_(owner.take()) {}
    Hold(const Hold&) = delete;
    ~Hold() {
      if (interrupt_) owner_.give_back(std::move(interrupt_));
    }
    explicit operator bool() const { return interrupt_ != nullptr; }  // false: there are too many
    Interrupt& operator*() const { return *interrupt_; }

   private:
    CallerInterrupts& owner_;
    std::unique_ptr<Interrupt> interrupt_;
  };

 private:
  static constexpr size_t kMaxInterrupts = 16;

  std::unique_ptr<Interrupt> take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return add();
    auto interrupt = std::move(idle_.back());
    idle_.pop_back();
    interrupt->clear();  // it was meant for something that is over
    return interrupt;
  }

  std::unique_ptr<Interrupt> add() try {
    if (count_ == kMaxInterrupts) return nullptr;
    idle_.reserve(kMaxInterrupts);
    auto interrupt = std::make_unique<Interrupt>();
    ++count_;
    return interrupt;
  } catch (const SystemError&) {
    return nullptr;  // no descriptors are left
  }

  void give_back(std::unique_ptr<Interrupt> interrupt) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(interrupt));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Interrupt>> idle_;
  size_t count_ = 0;
};

}  // namespace mk::transfer
