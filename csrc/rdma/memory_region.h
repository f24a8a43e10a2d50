// MemoryRegion: memory that a NIC may read and write, with its keys.
//
//   auto regions = register_memory({device}, {address, num_bytes}, kLocalWrite | kRemoteRead);
//   regions[0]->pieces()[0].rkey
//
// Layer: rdma.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rdma/device.h"
#include "rdma/span.h"
#include "rdma/verbs.h"

namespace mk::rdma {

// How a NIC accesses the memory.
enum class Mapping {
  kHost,     // host memory, pinned by ibv_reg_mr
  kDmabuf,   // GPU memory, exported as a dma-buf
  kPeermem,  // GPU memory, pinned through the nvidia_peermem module
};
const char* mapping_name(Mapping mapping);  // "host", "dmabuf", "peermem"

using Access = uint32_t;
constexpr Access kLocalWrite = 1, kRemoteRead = 2, kRemoteWrite = 4;
constexpr Access kRelaxedOrdering = 8;  // dropped if the library does not know it

struct DeregisterMr {
  void operator()(ibv_mr* mr) const { Verbs::get().p_ibv_dereg_mr(mr); }
};
using MrHandle = std::unique_ptr<ibv_mr, DeregisterMr>;

// A region has one piece, unless the device limits their size or GPU memory consists of several
// mappings. Sorted by address, without gaps.
struct Piece {
  Span span;
  MrHandle mr;
};

class MemoryRegion final : public Resource {
 public:
  MemoryRegion(std::shared_ptr<Device> device, Span span, Access access, Mapping mapping,
               std::vector<Piece> pieces, std::string note = "");  // for make_resource
  ~MemoryRegion() override;

  const std::shared_ptr<Device>& device() const { return device_; }
  Span span() const { return span_; }
  Access access() const { return access_; }
  Mapping mapping() const { return mapping_; }
  // For GPU memory, what did not work as intended: why it does not use dma-buf, why copies are not
  // synchronous.
  const std::string& note() const { return note_; }
  // A user of the keys must hold a Use: after closing, the device may reassign them.
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  void release() noexcept override { pieces_.clear(); }

  const std::shared_ptr<Device> device_;
  const Span span_;
  const Access access_;
  const Mapping mapping_;
  std::vector<Piece> pieces_;
  const std::string note_;
};
using RegionRef = std::shared_ptr<MemoryRegion>;

// How GPU memory is to be mapped.
enum class GpuMapping { kAuto, kDmabuf, kPeermem };

struct RegisterOptions {
  Access access = kLocalWrite;
  GpuMapping gpu_mapping = GpuMapping::kAuto;  // auto: dma-buf, else nvidia_peermem
  uint64_t max_piece_bytes = 0;                // a limit below the device's; 0: the device's
};

// Registers the memory on every device, large memory on all of them in parallel; returns one region
// per device, in their order. All or none. GPU memory is exported once for all. Throws
// InvalidArgument (an empty range, memory of several kinds, host memory with a GPU mapping that is
// not kAuto), Unavailable (GPU memory that can be
// mapped in neither way: both reasons), SystemError (errno, and its meaning here).
std::vector<RegionRef> register_memory(const std::vector<std::shared_ptr<Device>>& devices,
                                       Span span, const RegisterOptions& options);

// Registers already exported memory, from `offset` on, under the addresses of `span`.
RegionRef register_dmabuf(const std::shared_ptr<Device>& device, int fd, uint64_t offset, Span span,
                          Access access);

}  // namespace mk::rdma
