// process_id: getpid(2) without a system call, which costs more than the rest of a small transfer.
//
//   if (process_id() != pid_) ...   // in a forked child, however it was forked
//
// The number is kept in a page that the kernel clears in a child (MADV_WIPEONFORK).
#pragma once

#include <sys/types.h>

namespace mk {

pid_t process_id();

}  // namespace mk
