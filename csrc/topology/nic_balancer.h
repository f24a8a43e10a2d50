// NicBalancer: chooses among equally good NICs while data moves, by the load of each.
//
//   NicBalancer balancer({50.0, 50.0}, {{{0, 1}}});      // two NICs of 50 GB/s, one location
//   const int nic = balancer.pick(0, num_bytes);         // ... send ...
//   balancer.done(nic, num_bytes);
//
// Layer: topology. Python face: mooncake_kernels/topology/balancer.py.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace mk::topology {

// Thread-safe and lock-free. Two threads that pick at the same moment may miss each other's pick:
// that affects balance only.
class NicBalancer {
 public:
  using Tier = std::vector<int>;    // indices of equally good NICs, in order of preference
  using Tiers = std::vector<Tier>;  // of one location, the best first

  static constexpr int kNone = -1;

  // Throws InvalidArgument: a speed is not positive, or an index has no NIC.
  NicBalancer(const std::vector<double>& gb_per_s, std::vector<Tiers> tiers_by_location);

  // Picks from the first tier with a live NIC the one that would finish all it has in flight and
  // these bytes first (the earliest of equals), and counts them; kNone if no NIC is alive.
  int pick(size_t location, uint64_t num_bytes);

  // Undoes what pick has counted. Throws InvalidArgument if that much is not in flight.
  void done(int nic, uint64_t num_bytes);

  void set_alive(int nic, bool alive);

  uint64_t in_flight(int nic) const;
  size_t num_nics() const { return num_nics_; }

 private:
  struct alignas(64) Nic {  // one cache line each: no false sharing
    std::atomic<uint64_t> in_flight{0};
    std::atomic<bool> alive{true};
    double seconds_per_gb = 0;
  };

  Nic& nic_at(const char* op, int nic) const;

  size_t num_nics_;
  std::unique_ptr<Nic[]> nics_;
  std::vector<Tiers> tiers_;
};

}  // namespace mk::topology
