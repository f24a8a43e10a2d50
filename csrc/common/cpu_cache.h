// The size of the processor's caches, as reported by Linux.
//
// Layer: common.
#pragma once

#include <cstdint>

namespace mk {

// The size of the first processor's last-level cache; 8 MiB if the kernel does not report it. Not
// from sysconf(3): in virtual machines on AMD, glibc 2.36 reports ten times as much.
int64_t last_level_cache_bytes();

}  // namespace mk
