// process_id: getpid(2) without a system call, which would cost more than the rest of a small
// transfer.
//
//   if (process_id() != pid_) ...   // in a forked child, however it was forked
//
// The number is cached in a page that the kernel clears in a child (MADV_WIPEONFORK).
//
// Layer: common.
#pragma once

#include <sys/types.h>

namespace mk {

pid_t process_id();

}  // namespace mk
