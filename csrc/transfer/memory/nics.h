// Nics: the NICs that an engine uses, and memory that is registered on all of them.
//
//   Nics nics({{"mlx5_0", /*port=*/1, /*gb_per_s=*/50.0}}, {/*nodes=*/{0b1}, /*gpus=*/{0b1}});
//   auto memory = nics.add({address, num_bytes}, kLocalWrite | kRemoteWrite, /*device=*/-1);
//
// Layer: transfer. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "rdma/memory_region.h"
#include "rdma/queue_pair.h"
#include "rdma/verbs.h"
#include "transfer/base/range.h"

namespace mk::transfer {

// NICs are numbered from 0 by each engine, and sets of them are the bits of a number.
using NicSet = uint64_t;
constexpr size_t kMaxNics = 64;

// What the operator of the network decides of all packets.
struct PacketOptions {
  int gid_index = -1;  // -1: chosen (rdma::choose_gid)
  int traffic_class = 0;
  int service_level = 0;
};

struct NicOptions {
  std::string name;
  int port;
  double gb_per_s;  // of the link, as a first guess
  PacketOptions packets;
};

// Which NICs are nearest to which memory.
struct NearNics {
  std::vector<NicSet> nodes;  // for each NUMA node
  std::vector<NicSet> gpus;   // for each GPU, by CUDA's ordinals
};

struct Nic {
  std::shared_ptr<rdma::Device> device;
  int port;
  double gb_per_s;
  PacketOptions packets;
};

// The current state of its port. Throws Unavailable unless it is active.
rdma::PortInfo active_port(const Nic& nic);
bool is_active(const Nic& nic);  // false, too, if it cannot be asked

// For a queue pair of that NIC.
rdma::QueuePairOptions queue_pair_options(const Nic& nic);
rdma::ConnectOptions connect_options(const Nic& nic);

struct NicMemory {
  std::vector<rdma::RegionRef> regions;  // one per NIC; null: it could not register the memory
  NicSet near;                           // of the others, those nearest to this memory
  std::string note;                      // what could not, and why
};
using NicMemoryRef = std::shared_ptr<const NicMemory>;

class Nics {
 public:
  Nics() = default;
  // Opens them, and leaves out those that cannot be opened: see missing(). If there is none left
  // and NICs are `required`, throws the first reason: Unavailable, InvalidArgument (no such NIC,
  // too many), SystemError.
  Nics(const std::vector<NicOptions>& options, NearNics near, bool required);
  Nics(const Nics&) = delete;
  ~Nics() { close(); }

  size_t size() const { return nics_.size(); }
  const Nic& operator[](size_t i) const { return nics_[i]; }
  // Why those that are left out could not be opened: "mlx5_1: ibv_open_device: ...".
  const std::vector<std::string>& missing() const { return missing_; }

  // On all NICs that can register it; null if there are none. `device`: the GPU that holds the
  // memory, or -1. Throws as rdma::register_memory if not one of them can.
  NicMemoryRef add(const Range& range, Rights rights, int device) const;
  // When it returns, no NIC touches the memory.
  static void remove(const NicMemory& memory) noexcept;

  // Closes the NICs, and all registrations on them. Idempotent.
  void close() noexcept;

 private:
  NicSet near_of(const Range& range, int device) const;

  std::vector<Nic> nics_;
  std::vector<std::string> missing_;
  NearNics near_;
};

}  // namespace mk::transfer
