// GpuFence: the GPU work that must be done before a request may touch its local memory: all that
// was queued in a stream, or before an event, when the fence was made.
//
//   const auto fence = GpuFence::behind_stream(reinterpret_cast<uint64_t>(stream), /*device=*/0);
//   while (!fence->passed()) ...     // the GPU has done it
//
// Layer: transfer. Thread-safe. It is polled instead of being waited for in a stream of the
// engine's, because work waiting in a stream cannot be withdrawn when a deadline passes or a caller
// cancels. The stream or event may be reused, or destroyed, as soon as the fence is made.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace mk::transfer {

class GpuFence {
 public:
  // Driver handles; a stream of 0 is the legacy default one. `device`: their GPU; for an event -1
  // is any in use. Throw Unavailable, CudaError.
  static std::shared_ptr<GpuFence> behind_stream(uint64_t stream, int device);
  static std::shared_ptr<GpuFence> behind_event(uint64_t event, int device);
  ~GpuFence();

  bool passed();  // throws GpuFailure

 private:
  struct Driver;  // what needs cuda.h
  explicit GpuFence(std::unique_ptr<Driver> driver);

  const std::unique_ptr<Driver> driver_;
  std::atomic<bool> passed_{false};
};

}  // namespace mk::transfer
