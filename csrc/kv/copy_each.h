// One cudaMemcpyAsync per range: for a few large ones. Unlike a batch for the copy engines it needs
// no new driver, may run on any stream, and can be captured into graphs. Layer: kv.
#pragma once

#include <cstdint>

#include "kv/copy_range.h"

namespace mk::kv {

// Queues the copies on `stream` (a cudaStream_t) of the current device. Throws CudaError.
void launch_copy_each(const CopyRange* ranges, int64_t num_ranges, void* stream);

}  // namespace mk::kv
