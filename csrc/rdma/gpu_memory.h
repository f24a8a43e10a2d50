// GPU memory from a NIC's point of view: its mappings, its export as a dma-buf, and when data
// written to it can be read.
//
// Layer: rdma. Uses a CUDA driver that is already loaded; without one, all memory is host memory.
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
  std::vector<Span> mappings;  // cover it; each within one allocation
};

// Empty for host memory. Throws InvalidArgument if part of it is not where its beginning is.
std::optional<GpuMemory> find_gpu_memory(Span span);

// The number of the allocation that holds a GPU address; it changes when the memory was freed and
// the address reused. 0 if the driver does not know the address (any longer).
uint64_t allocation_id(uint64_t address);

struct DmabufExport {
  Fd fd;
  Span span;  // whole pages around the requested memory
};

struct DmabufExports {
  std::vector<DmabufExport> exports;  // cover the memory, in order; empty on failure
  std::string reason;                 // of that failure
};

// One export for all of it or, if the driver refuses that (several mappings), one per mapping.
DmabufExports export_dmabufs(const GpuMemory& memory, Span span);

// Makes the driver complete synchronous copies to and from that memory before they return, as is
// necessary if a NIC reads it too. Returns the reason if that fails, else an empty string.
std::string synchronize_copies(const GpuMemory& memory);

// Makes what NICs have written to a GPU visible to kernels launched from now on. Returns false if
// the hardware does that by itself. Throws Unavailable, CudaError.
bool flush_writes(int device);

}  // namespace mk::rdma
