// Copies a list by the GPU's copy engines: cuMemcpyBatchAsync, in CUDA 12.8 and later.
//
// A copy engine leaves the multiprocessors free, and is the fastest way over PCIe for ranges of
// about 30 KiB and more; submitting takes the CPU about half a microsecond per range. Layer: kv.
#pragma once

#include <cstdint>
#include <string>

#include "kv/copy_range.h"

namespace mk::kv {

// Why it cannot be used; empty if it can.
std::string copy_engine_missing();

// Queues all ranges on `stream` (a cudaStream_t) of the current context, or of any if the calling
// thread has none. Throws Unavailable if copy_engine_missing(), InvalidArgument on the legacy
// default stream, which the driver does not accept, and CudaError, also for a stream that is being
// captured, which CUDA does not support.
//
// With `any_order` a source may be read before the stream's earlier work is done, and until the
// copy is: for sources that no one is writing to.
void copy_by_engine(const CopyRange* ranges, int64_t num_ranges, bool any_order, void* stream);

}  // namespace mk::kv
