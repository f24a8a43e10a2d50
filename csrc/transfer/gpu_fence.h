// GpuFence: what a GPU has to do before a request may touch its local memory: all that was in a
// stream, or what an event was recorded behind, when the fence was made.
//
//   const auto fence = GpuFence::behind_stream(reinterpret_cast<uint64_t>(stream), /*device=*/0);
//   while (!fence->passed()) ...     // the GPU has done it
//
// Layer: transfer. Thread-safe. It is asked, and not put into a stream of the engine's: what waits
// in a stream cannot be taken back when a deadline passes or somebody cancels. The stream or event
// may be used anew, or destroyed, as soon as the fence is made.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace mk::transfer {

class GpuFence {
 public:
  // Handles of the driver; a stream of 0 is the legacy default one. `device`: whose they are; of an
  // event -1 is any that is in use. Throw Unavailable, CudaError.
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
