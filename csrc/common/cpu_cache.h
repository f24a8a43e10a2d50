// The size of the processor's caches, as Linux tells it.
#pragma once

#include <cstdint>

namespace mk {

// Bytes of the last-level cache that the first processor uses; 8 MiB where the kernel tells
// nothing. sysconf(3) is not asked: in virtual machines on AMD, glibc 2.36 makes ten times as much
// of it.
int64_t last_level_cache_bytes();

}  // namespace mk
