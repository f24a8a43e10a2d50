#include "store/rows.h"

#include <algorithm>

namespace mk::store {

uint32_t claim_row(const View& view) {
  const Process me = Process::current();
  for (uint32_t i = 0; i < view.geometry.num_rows; ++i) {
    Row& row = view.rows[i];
    if (row.pid.load() != 0) continue;
    row.start_time.store(me.start_time);
    row.pid.store(me.pid);
    return i;
  }
  return kNone;
}

bool is_alive(const Row& row) {
  const uint64_t pid = row.pid.load();
  return pid != 0 && Process{pid, row.start_time.load()}.is_alive();
}

void clear_row(const View& view, uint32_t row) {
  const uint32_t num_slots = view.geometry.num_slots;
  Slot* const slots = view.slots + uint64_t{row} * num_slots;
  for (uint32_t i = 0; i < num_slots; ++i) slots[i].store(0, std::memory_order_release);
  view.rows[row].num_slots.store(0);
  view.rows[row].pid.store(0);
}

OwnSlots::OwnSlots(const View& view, uint32_t row) : view_(view), row_(row) {}

uint32_t OwnSlots::take() {
  const uint32_t num_slots = view_.geometry.num_slots;
  const std::lock_guard lock(mutex_);
  uint32_t index = num_used_;
  if (!returned_.empty()) {
    index = returned_.back();
    returned_.pop_back();
  } else if (index == num_slots) {
    return kNone;
  } else {
    view_.rows[row_].num_slots.store(++num_used_);
  }
  return row_ * num_slots + index;
}

void OwnSlots::give_back(uint32_t slot) {
  view_.slots[slot].store(0, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  returned_.push_back(slot - row_ * view_.geometry.num_slots);
}

PinnedSet::PinnedSet(const View& view) {
  const Geometry& geometry = view.geometry;
  for (uint32_t i = 0; i < geometry.num_rows; ++i) {
    const Slot* const slots = view.slots + uint64_t{i} * geometry.num_slots;
    const uint32_t num_slots = std::min(view.rows[i].num_slots.load(), geometry.num_slots);
    for (uint32_t slot = 0; slot < num_slots; ++slot) {
      if (const uint64_t word = slots[slot].load()) words_.push_back(word);
    }
  }
  std::sort(words_.begin(), words_.end());
}

bool PinnedSet::contains(uint32_t entry, uint64_t generation) const {
  return std::binary_search(words_.begin(), words_.end(), slot_of(entry, generation));
}

}  // namespace mk::store
