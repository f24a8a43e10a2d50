#include "topology/nic_balancer.h"

#include <cmath>
#include <utility>

#include "common/check.h"

namespace mk::topology {

NicBalancer::NicBalancer(const std::vector<double>& gb_per_s, std::vector<Tiers> tiers_by_location)
    : num_nics_(gb_per_s.size()), nics_(new Nic[num_nics_]), tiers_(std::move(tiers_by_location)) {
  for (size_t i = 0; i < num_nics_; ++i) {
    MK_CHECK(std::isfinite(gb_per_s[i]) && gb_per_s[i] > 0, "NicBalancer: gb_per_s[", i,
             "] must be a number > 0, got ", gb_per_s[i]);
    nics_[i].seconds_per_gb = 1 / gb_per_s[i];
  }
  for (const Tiers& tiers : tiers_) {
    for (const Tier& tier : tiers) {
      for (const int nic : tier) nic_at("NicBalancer", nic);
    }
  }
}

int NicBalancer::pick(size_t location, uint64_t num_bytes) {
  MK_CHECK(location < tiers_.size(), "pick: location must be in [0, ", tiers_.size(), "), got ",
           location);
  for (const Tier& tier : tiers_[location]) {
    int best = kNone;
    double least = 0;
    for (const int nic : tier) {
      const Nic& candidate = nics_[nic];
      if (!candidate.alive.load(std::memory_order_relaxed)) continue;
      const uint64_t queued = candidate.in_flight.load(std::memory_order_relaxed);
      const double until =
          (static_cast<double>(queued) + static_cast<double>(num_bytes)) * candidate.seconds_per_gb;
      if (best == kNone || until < least) {
        best = nic;
        least = until;
      }
    }
    if (best == kNone) continue;
    nics_[best].in_flight.fetch_add(num_bytes, std::memory_order_relaxed);
    return best;
  }
  return kNone;
}

void NicBalancer::done(int nic, uint64_t num_bytes) {
  std::atomic<uint64_t>& in_flight = nic_at("done", nic).in_flight;
  uint64_t queued = in_flight.load(std::memory_order_relaxed);
  do {
    MK_CHECK(queued >= num_bytes, "done: num_bytes must be in flight on NIC ", nic, ", got ",
             num_bytes, " of ", queued);
  } while (!in_flight.compare_exchange_weak(queued, queued - num_bytes, std::memory_order_relaxed));
}

void NicBalancer::set_alive(int nic, bool alive) {
  nic_at("set_alive", nic).alive.store(alive, std::memory_order_relaxed);
}

uint64_t NicBalancer::in_flight(int nic) const {
  return nic_at("in_flight", nic).in_flight.load(std::memory_order_relaxed);
}

NicBalancer::Nic& NicBalancer::nic_at(const char* op, int nic) const {
  MK_CHECK(nic >= 0 && static_cast<size_t>(nic) < num_nics_, op, ": nic must be in [0, ", num_nics_,
           "), got ", nic);
  return nics_[nic];
}

}  // namespace mk::topology
