// GPU memory as a NIC sees it: of which mappings it consists, as a dma-buf, and when what was
// written to it can be read.
//
// Layer: rdma. Uses a CUDA driver that somebody else has loaded; without one all memory is host's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/fd.h"
#include "rdma/span.h"

namespace mk::rdma {

// Memory of one GPU.
struct GpuMemory {
  int device = 0;
  std::vector<Span> mappings;  // which cover it, each of one allocation
};

// Nothing for host memory. Throws InvalidArgument if a part of it is elsewhere than its beginning.
std::optional<GpuMemory> find_gpu_memory(Span span);

// Which allocation an address of a GPU belongs to: another number once it was freed and the
// address was given out again. 0 if the driver does not know it (any longer).
uint64_t allocation_id(uint64_t address);

struct DmabufExport {
  Fd fd;
  Span span;  // of pages; it holds the memory asked for
};

struct DmabufExports {
  std::vector<DmabufExport> exports;  // which cover the memory, in order; empty if it cannot be
  std::string reason;                 // why not
};

// One export of all of it; where the driver refuses that (several mappings), one each.
DmabufExports export_dmabufs(const GpuMemory& memory, Span span);

// Makes the driver finish synchronous copies to and from that memory before they return, as they
// must where a NIC reads it too. The reason if it cannot; empty if it does.
std::string synchronize_copies(const GpuMemory& memory);

// Makes what NICs have written to a GPU visible to kernels that are launched from now on.
// Returns false if the hardware sees to that by itself. Throws Unavailable, CudaError.
bool flush_writes(int device);

}  // namespace mk::rdma
