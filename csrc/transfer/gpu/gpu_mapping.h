// GpuMapping: GPU memory of another process on this machine, opened here by the driver's handle. It
// is closed when the last reference to the object is gone.
//
//   GpuEntry entry = export_region(region);          // the owner; goes over the wire
//   GpuMapping mapping(entry);                       // the other
//   if (mapping.open()) copy(mapping.base() + entry.offset, ...);
//
// Layer: transfer. One thread. Memory of cudaMallocAsync, and of the virtual memory calls (like
// torch's expandable segments), has no such handle.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transfer/memory/region_table.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

// For a region in GPU memory. If it cannot be opened elsewhere, the entry says why.
GpuEntry export_region(const Region& region) noexcept;

class GpuMapping {
 public:
  explicit GpuMapping(const GpuEntry& entry);
  GpuMapping(const GpuMapping&) = delete;
  ~GpuMapping();

  // Whether it belongs to that allocation.
  bool is_of(const GpuEntry& entry) const {
    return entry.error == entry_.error && entry.handle == entry_.handle && entry.gpu == entry_.gpu;
  }

  // Opens it, the first time that this process uses CUDA. False: not possible, see why_not().
  bool open();
  const std::string& why_not() const { return why_not_; }

  uint64_t base() const { return base_; }  // of the allocation, in this process
  int device() const { return device_; }   // by this process's ordinals

 private:
  void try_open();

  const GpuEntry entry_;
  bool is_tried_ = false;
  std::string why_not_;
  uint64_t base_ = 0;
  int device_ = -1;
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace mk::transfer
