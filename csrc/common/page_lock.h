// PageLock: host memory that is page-locked for as long as it lives, so that GPUs copy from and to
// it by themselves, at the speed of their bus.
//
//   const PageLock lock(data, num_bytes, /*device=*/0);
//
// Layer: common. It touches every page, and the memory cannot be swapped out.
#pragma once

#include <cstdint>
#include <memory>

namespace mk {

class PageLock {
 public:
  // `device`: whose context asks for it; it holds for all GPUs. Throws Unavailable, CudaError.
  PageLock(char* data, uint64_t num_bytes, int device);
  PageLock(const PageLock&) = delete;
  ~PageLock();

 private:
  struct Held;
  std::unique_ptr<Held> held_;
};

}  // namespace mk
