// Copies that touch GPU memory, by the CUDA driver, in a stream.
//
//   copy_in_stream({{dst, src, num_bytes}}, /*page_locked=*/true, /*device=*/0, stream);
//
// Layer: common.
#pragma once

#include <cstdint>
#include <vector>

#include "common/cuda_driver.h"

namespace mk {

struct StreamCopy {
  uint64_t dst;
  uint64_t src;
  uint64_t num_bytes;
};

// Copies, unordered among themselves, after all that is in the stream (a driver handle; 0: the
// legacy default stream). Returns when they are done, even if it throws Unavailable or CudaError.
// `page_locked`: all host memory involved is.
void copy_in_stream(const std::vector<StreamCopy>& copies, bool page_locked, int device,
                    uint64_t stream);

// Returns when all that is in the stream is done. Throws as above.
void wait_for_stream(int device, uint64_t stream);

#if MK_HAVE_CUDA_H

// Queues copies in a stream of the current context. Throws CudaError; some may be queued by then.
class CopyList {
 public:
  void add(uint64_t dst, uint64_t src, uint64_t num_bytes);
  void queue(bool page_locked, CUstream stream) const;

 private:
  bool queue_at_once(CUstream stream) const;

  std::vector<CUdeviceptr> dst_, src_;
  std::vector<size_t> num_bytes_;
};

#endif

}  // namespace mk
