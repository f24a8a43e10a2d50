// Nics: the NICs that an engine moves data with, and memory that is registered on all of them.
//
//   Nics nics({{"mlx5_0", /*port=*/1, /*gb_per_s=*/50.0}}, {/*nodes=*/{0b1}, /*gpus=*/{0b1}});
//   auto memory = nics.add({address, num_bytes}, kLocalWrite | kRemoteWrite, /*device=*/-1);
//
// Layer: transfer. Thread-safe. Where there are no verbs, there are no NICs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "rdma/memory_region.h"
#include "rdma/verbs.h"
#include "transfer/range.h"

namespace mk::transfer {

// NICs are numbered from 0 by each engine, and sets of them are the bits of a number.
using NicSet = uint64_t;
constexpr size_t kMaxNics = 64;

struct NicOptions {
  std::string name;
  int port;
  double gb_per_s;  // what the link carries, as a first guess
};

// Which NICs memory is best reached by.
struct NearNics {
  std::vector<NicSet> nodes;  // of each NUMA node
  std::vector<NicSet> gpus;   // of each GPU, by CUDA's numbers
};

#if MK_HAVE_VERBS
struct Nic {
  std::shared_ptr<rdma::Device> device;
  int port;
  double gb_per_s;
};

// Of its port, as it is now. Throws Unavailable unless it is active.
rdma::PortInfo active_port(const Nic& nic);

struct NicMemory {
  std::vector<rdma::RegionRef> regions;  // one a NIC
  NicSet near;                           // those that this memory is best reached by
};
#else
struct Nic {};
struct NicMemory {};
#endif
using NicMemoryRef = std::shared_ptr<const NicMemory>;

class Nics {
 public:
  Nics() = default;
  // Opens them. Throws Unavailable, InvalidArgument (no such NIC, too many), SystemError.
  Nics(const std::vector<NicOptions>& options, NearNics near);
  Nics(const Nics&) = delete;
  ~Nics() { close(); }

  size_t size() const { return nics_.size(); }
  const Nic& operator[](size_t i) const { return nics_[i]; }

  // On all NICs or on none; null if there are none. `device`: the GPU whose memory it is, or -1.
  // Throws as rdma::register_memory.
  NicMemoryRef add(const Range& range, Rights rights, int device) const;
  // When it returns, no NIC touches the memory.
  static void remove(const NicMemory& memory) noexcept;

  // Closes the NICs, with all that is registered. Idempotent.
  void close() noexcept;

 private:
  NicSet near_of(const Range& range, int device) const;

  std::vector<Nic> nics_;
  NearNics near_;
};

}  // namespace mk::transfer
