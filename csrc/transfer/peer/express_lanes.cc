#include "transfer/peer/express_lanes.h"

#include <exception>
#include <utility>

#include "common/thread.h"

namespace mk::transfer {

bool ExpressLanes::has_mine() {
  for (size_t i = 0; i < num_lanes_; ++i) {
    if (lanes_[i]->queue.has_mine()) return true;
  }
  return false;
}

ExpressLanes::~ExpressLanes() {
  for (size_t i = 0; i < num_lanes_; ++i) pool_.remove_express_lane();
}

bool ExpressLanes::begin(const TicketRef& ticket, uint64_t max_piece_bytes) {
  InflightFence::Entry entry(fence_);
  if (!entry) return false;
  bool all_busy = true;
  for (size_t i = 0; i < num_lanes_; ++i) {
    if (!lanes_[i]->queue.idle()) continue;
    all_busy = false;
    ticket->set_express_lane(i + 1);
    if (lanes_[i]->lane().begin_in_caller(ticket, max_piece_bytes)) {
      entry.keep();
      return true;
    }
    lanes_[i]->lane().connect_soon();
  }
  ticket->set_express_lane(0);
  if (all_busy) add();
  return false;
}

void ExpressLanes::add() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  const size_t number = num_lanes_;
  if (!lock || closed_ || number == kMaxLanes || !pool_.add_express_lane()) return;
  try {
    auto created = std::make_unique<ExpressLane>(peer_name_, fence_);
    created->lanes.push_back(make_(created->queue, created->lanes, number));
    created->thread = start_thread([&lane = created->lane()] { lane.run(); });
    lanes_[number] = std::move(created);
  } catch (const std::exception&) {  // no threads or descriptors are left: the queue carries on
    return pool_.remove_express_lane();
  }
  ++num_lanes_;
  lanes_[number]->lane().connect_soon();
}

bool ExpressLanes::drive(const Ticket& ticket, const Deadline& until, bool polls) {
  return of(ticket).lane().drive(ticket, until, polls);
}

void ExpressLanes::abandon(const Ticket& ticket, const ErrorReason& reason) {
  of(ticket).queue.abandon(ticket, reason);
}

void ExpressLanes::interrupt(const ErrorReason& reason) {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (size_t i = 0; i < num_lanes_; ++i) {
    lanes_[i]->queue.close(reason);
    lanes_[i]->lane().interrupt().signal(reason);  // it may be connecting
  }
}

void ExpressLanes::close(const ErrorReason& reason) {
  interrupt(reason);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < num_lanes_; ++i) {
    if (lanes_[i]->thread.joinable()) lanes_[i]->thread.join();
    lanes_[i]->lane().close();
  }
}

}  // namespace mk::transfer
