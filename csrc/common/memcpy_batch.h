// cuMemcpyBatchAsync, in drivers of CUDA 12.8 and later: many copies in one call.
//
//   if (memcpy_batch_missing().empty()) memcpy_batch()(dst, src, sizes, n, ...);
//
// Layer: common. For .cc files only.
#pragma once

#include "common/cuda_driver.h"

#if MK_HAVE_CUDA_H && CUDA_VERSION >= 12080
#define MK_HAVE_MEMCPY_BATCH 1
#include <cudaTypedefs.h>

namespace mk {

// CUDA 13's header declares a different signature under this name. We request that of 12.8 from the
// driver: drivers of 13 still have it, and it reports which copy failed.
using MemcpyBatch = PFN_cuMemcpyBatchAsync_v12080;

MemcpyBatch memcpy_batch();                 // null if it is missing
const std::string& memcpy_batch_missing();  // why it is missing; empty if it is there

}  // namespace mk
#else
#define MK_HAVE_MEMCPY_BATCH 0
#endif
