// PageLock: page-locks host memory while the object lives, so that GPUs access it by DMA at the
// speed of their bus.
//
//   const PageLock lock(data, num_bytes, /*device=*/0);
//
// Layer: common. Locking touches every page, and the memory cannot be swapped out.
#pragma once

#include <cstdint>
#include <memory>

namespace mk {

class PageLock {
 public:
  // `device`: whose context requests it; it holds for all GPUs. Throws Unavailable, CudaError.
  PageLock(char* data, uint64_t num_bytes, int device);
  PageLock(const PageLock&) = delete;
  ~PageLock();

 private:
  struct Held;
  std::unique_ptr<Held> held_;
};

}  // namespace mk
