// GpuRanges: which of an engine's regions are GPU memory.
//
//   const GpuRanges gpus(request.regions);
//   const GpuRanges::Stretch there = gpus.at(address, num_bytes);   // .device: -1 for host memory
//
// Layer: transfer.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "transfer/memory/region_table.h"

namespace mk::transfer {

class GpuRanges {
 public:
  GpuRanges() = default;  // all is host memory
  explicit GpuRanges(const std::vector<RegionRef>& regions);

  bool empty() const { return regions_.empty(); }

  // Memory from an address on that has one location.
  struct Stretch {
    int device;          // -1: of the host
    uint64_t num_bytes;  // no more than requested
  };
  Stretch at(uint64_t address, uint64_t num_bytes) const;
  int device_of(uint64_t address) const { return at(address, 1).device; }

 private:
  struct Item {
    Range range;
    int device;
  };
  std::vector<Item> regions_;  // by address; they do not overlap
};

// Calls each(address, bytes, device) for stretches of the parts, in their order.
template <class Each>
void for_each_stretch(const std::vector<iovec>& parts, const GpuRanges& gpus, Each each) {
  for (const iovec& part : parts) {
    auto address = reinterpret_cast<uint64_t>(part.iov_base);
    for (const uint64_t end = address + part.iov_len; address < end;) {
      const GpuRanges::Stretch there = gpus.at(address, end - address);
      each(address, there.num_bytes, there.device);
      address += there.num_bytes;
    }
  }
}

}  // namespace mk::transfer
