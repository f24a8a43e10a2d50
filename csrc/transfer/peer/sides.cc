#include "transfer/peer/sides.h"

#include <exception>
#include <utility>

#include "common/thread.h"

namespace mk::transfer {

bool Sides::has_mine() {
  for (size_t i = 0; i < num_sides_; ++i) {
    if (sides_[i]->queue.has_mine()) return true;
  }
  return false;
}

Sides::~Sides() {
  for (size_t i = 0; i < num_sides_; ++i) pool_.remove_side();
}

bool Sides::begin(const TicketRef& ticket, uint64_t max_piece_bytes) {
  Beside::Entry entry(beside_);
  if (!entry) return false;
  bool all_busy = true;
  for (size_t i = 0; i < num_sides_; ++i) {
    if (!sides_[i]->queue.idle()) continue;
    all_busy = false;
    ticket->set_side(i + 1);
    if (sides_[i]->lane().begin_here(ticket, max_piece_bytes)) {
      entry.keep();
      return true;
    }
    sides_[i]->lane().connect_soon();
  }
  ticket->set_side(0);
  if (all_busy) add();
  return false;
}

void Sides::add() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  const size_t number = num_sides_;
  if (!lock || closed_ || number == kMaxSides || !pool_.add_side()) return;
  try {
    auto side = std::make_unique<Side>(peer_name_, beside_);
    side->lanes.push_back(make_(side->queue, side->lanes, number));
    side->thread = start_thread([&lane = side->lane()] { lane.run(); });
    sides_[number] = std::move(side);
  } catch (const std::exception&) {  // no threads or descriptors are left: the queue carries on
    return pool_.remove_side();
  }
  ++num_sides_;
  sides_[number]->lane().connect_soon();
}

void Sides::wait_here(const Ticket& ticket, const Deadline& until) {
  of(ticket).lane().wait_here(ticket, until);
}

void Sides::abandon(const Ticket& ticket, const Cause& cause) {
  of(ticket).queue.abandon(ticket, cause);
}

void Sides::interrupt(const Cause& cause) {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (size_t i = 0; i < num_sides_; ++i) {
    sides_[i]->queue.close(cause);
    sides_[i]->lane().interrupt().signal(cause);  // it may be connecting
  }
}

void Sides::close(const Cause& cause) {
  interrupt(cause);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < num_sides_; ++i) {
    if (sides_[i]->thread.joinable()) sides_[i]->thread.join();
    sides_[i]->lane().close();
  }
}

}  // namespace mk::transfer
