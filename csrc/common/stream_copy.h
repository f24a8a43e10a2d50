// Copies that touch memory of GPUs, by the CUDA driver, in a stream.
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

// Copies, in any order among themselves, behind all that is in the stream, a handle of the driver
// (0: the legacy default one), and returns when that is over, also where it throws Unavailable or
// CudaError. `page_locked`: all host memory among it is.
void copy_in_stream(const std::vector<StreamCopy>& copies, bool page_locked, int device,
                    uint64_t stream);

// Returns when all that is in the stream is over. Throws as above.
void wait_for_stream(int device, uint64_t stream);

#if MK_HAVE_CUDA_H

// Queues copies in a stream of the current context. Throws CudaError; some may be queued then.
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
