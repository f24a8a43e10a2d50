#include "transfer/memory/control_page.h"

#include <signal.h>

#include <cerrno>

namespace mk::transfer {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share them");

Offer ControlPage::offer() {
  const std::lock_guard lock(mutex_);
  uint32_t index = num_slots_used_;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else if (num_slots_used_++ == kNumSlots) {
    --num_slots_used_;
    return {0, 0};
  }
  const Offer offer{index, ++num_offers_};
  slot(index).generation.store(offer.generation);
  return offer;
}

void ControlPage::withdraw(const Offer& offer) { slot(offer.slot).generation.store(0); }

bool ControlPage::in_use(const Offer& offer) const {
  if (ended_ || slot(offer.slot).num_users.load() == 0) return false;
  return kill(initiator_, 0) == 0 || errno != ESRCH;
}

void ControlPage::release(const Offer& offer) {
  const std::lock_guard lock(mutex_);
  free_.push_back(offer.slot);
}

}  // namespace mk::transfer
