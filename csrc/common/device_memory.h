// DeviceMemory: memory of a GPU, in its primary context, with a stream for copies.
//
//   const DeviceMemory memory(num_bytes, /*alignment=*/4096, /*device=*/0);
//   copy_in_stream({{memory.address(), src, num_bytes}}, false, memory.device(), memory.stream());
//
// Layer: common. Initially uninitialized.
#pragma once

#include <cstdint>
#include <memory>

namespace mk {

class DeviceMemory {
 public:
  // `alignment`: a power of two. Throws Unavailable, CudaError.
  DeviceMemory(uint64_t num_bytes, uint64_t alignment, int device);
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory();

  uint64_t address() const;
  int device() const;
  uint64_t stream() const;  // a driver handle

 private:
  struct Held;
  std::unique_ptr<Held> held_;
};

}  // namespace mk
