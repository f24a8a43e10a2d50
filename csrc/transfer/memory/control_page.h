// ControlPage: shared memory between a target and one initiator on the same machine. The target
// publishes which of its regions may be used, the initiator which ones it is using.
//
//   // target                                    // initiator
//   const Offer offer = page.offer();           const ControlPageUse use(page, offer);
//   ...                                          if (use) copy();
//   page.withdraw(offer);
//   while (page.in_use(offer)) wait();
//
// Layer: transfer. If an initiator is killed, the control page is ignored: once its connection
// ends, or no process has its id any more, for a child that it has forked may keep the connection
// open. The slots are as trustworthy as the process at the other end, which runs as the same user
// and could access the memory anyway.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "common/shared_memory.h"

namespace mk::transfer {

// A region on a control page.
struct Offer {
  uint32_t slot;
  uint64_t generation;  // never 0, and no two of one control page share it
};

class ControlPage {
 public:
  static constexpr uint32_t kNumSlots = 4096;

  struct Slot {
    std::atomic<uint64_t> generation;  // of what may be used; 0: nothing
    std::atomic<uint64_t> num_users;
  };

  // The target's, for that initiator; all slots are 0.
  explicit ControlPage(pid_t initiator) : memory_(kNumBytes), initiator_(initiator) {}
  explicit ControlPage(const Fd& fd) : memory_(fd) {}  // the initiator's
  bool is_whole() const { return memory_.num_bytes() >= kNumBytes; }
  const Fd& fd() const { return memory_.fd(); }
  Slot& slot(uint32_t index) const { return reinterpret_cast<Slot*>(memory_.data())[index]; }
  // Raised (liveness.h) while the target's thread serves the connection.
  std::atomic<uint32_t>& liveness() const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(memory_.data() + kNumSlots * sizeof(Slot));
  }

  // Whether it is not withdrawn, for now.
  bool stands(const Offer& offer) const {
    return slot(offer.slot).generation.load() == offer.generation;
  }

  // The target's. offer() returns generation 0 if no slot is free.
  Offer offer();
  void withdraw(const Offer& offer);  // no new use begins
  bool in_use(const Offer& offer) const;
  void release(const Offer& offer);  // the slot may be offered again
  void end() { ended_ = true; }      // the initiator is gone

 private:
  static constexpr uint64_t kNumBytes = kNumSlots * sizeof(Slot) + sizeof(uint64_t);

  const SharedMemory memory_;
  const pid_t initiator_ = 0;
  std::atomic<bool> ended_{false};
  std::mutex mutex_;
  std::vector<uint32_t> free_;
  uint32_t num_slots_used_ = 0;
  uint64_t num_offers_ = 0;
};

// Holds an offer in use, if it still stands.
class ControlPageUse {
 public:
  ControlPageUse(const ControlPage& page, const Offer& offer) : slot_(&page.slot(offer.slot)) {
    // In this order, and in total order with withdraw() and in_use(): either the target sees the
    // user, or the user sees that the offer is withdrawn.
    slot_->num_users.fetch_add(1);
    stands_ = page.stands(offer);
  }
  ControlPageUse(ControlPageUse&& other) noexcept : slot_(other.slot_), stands_(other.stands_) {
    other.slot_ = nullptr;
  }
  ~ControlPageUse() {
    if (slot_) slot_->num_users.fetch_sub(1);
  }

  explicit operator bool() const { return stands_; }

 private:
  ControlPage::Slot* slot_;
  bool stands_;
};

}  // namespace mk::transfer
