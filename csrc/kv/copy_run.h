// One contiguous copy on the CPU, by the way that suits the size of the whole job.
#pragma once

#include <cstdint>

namespace mk::kv {

// `next` is where the run after this one, equally long, will be read from, or null: what it begins
// with is fetched ahead, because the processor's own prefetching stops at the end of a page.
using CopyRun = void (*)(char* dst, const char* src, int64_t num_bytes, const char* next);

// `total_bytes` of the whole job, in runs of `run_bytes`. What does not fit the last-level cache
// is stored past it (non-temporal): a plain store first reads the line that it overwrites, which
// costs a third of the memory's bandwidth, and evicts what somebody else was using.
CopyRun choose_copy_run(int64_t total_bytes, int64_t run_bytes);

}  // namespace mk::kv
