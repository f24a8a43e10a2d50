// One contiguous copy on the CPU, by the way that suits the size of the whole job.
#pragma once

#include <cstdint>

namespace mk::kv {

using CopyRun = void (*)(void* dst, const void* src, int64_t num_bytes);

// `total_bytes` of the whole job, in runs of `run_bytes`. What does not fit the last-level cache
// is stored past it (non-temporal): a plain store first reads the line that it overwrites, which
// costs a third of the memory's bandwidth, and evicts what somebody else was using.
CopyRun choose_copy_run(int64_t total_bytes, int64_t run_bytes);

}  // namespace mk::kv
