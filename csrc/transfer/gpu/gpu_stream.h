// GpuStream: a separate stream on one GPU, on which copies run in order; each batch has a number by
// which one can tell whether it is done.
//
//   GpuStream stream(/*device=*/0);
//   const uint64_t number = stream.copy({{dst, src, num_bytes, 0}});   // begins
//   while (!stream.is_over(number)) ...
//
// Layer: transfer. One thread. The stream is non-blocking: it does not synchronize with the legacy
// default stream. In a build without cuda.h there is none: Unavailable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mk::transfer {

constexpr int kPinned = -1;   // pinned host memory
constexpr int kAnyHost = -2;  // host memory, possibly not pinned

// One end is memory of the GPU `device`, the other is of the GPU `other` or of the host.
struct GpuCopy {
  uint64_t dst;
  uint64_t src;
  uint64_t num_bytes;
  int device;
  int other = kPinned;
};

class GpuStream {
 public:
  explicit GpuStream(int device);  // throws Unavailable, CudaError
  ~GpuStream();

  // Begins copies, in any order among themselves. Throws CudaError; some may have begun then.
  uint64_t copy(const std::vector<GpuCopy>& copies);
  // Whether that batch, and all earlier ones, are done. Throws CudaError.
  bool is_over(uint64_t number);
  uint64_t last() const { return num_begun_; }

 private:
  struct Driver;  // what needs cuda.h
  void begin(const std::vector<GpuCopy>& copies);
  void remember();

  const std::unique_ptr<Driver> driver_;
  uint64_t num_begun_ = 0;
  uint64_t num_over_ = 0;
  bool is_lost_ = false;  // copies have begun that cannot be waited for
};

// Why there is no GPU driver on this machine; empty if there is.
std::string missing_gpu_driver();

// Host memory that GPUs access without the help of a processor.
class PinnedMemory {
 public:
  PinnedMemory(uint64_t num_bytes, int device);  // throws Unavailable, CudaError
  PinnedMemory(const PinnedMemory&) = delete;
  ~PinnedMemory();

  char* data() const { return data_; }
  void leak() { data_ = nullptr; }  // a hung GPU may still use it

 private:
  struct Context;
  const std::unique_ptr<Context> context_;
  char* data_ = nullptr;
};

}  // namespace mk::transfer
