// Process: who a process is, so that others can tell later whether it is still there: a process id
// alone is given to somebody else after its owner's death.
//
//   const Process me = Process::current();
//   if (!other.is_alive()) take_back_what_it_held(other);
//
// Layer: store.
#pragma once

#include <cstdint>

namespace mk::store {

struct Process {
  uint64_t pid;         // 0: nobody
  uint64_t start_time;  // of its first thread, in the kernel's ticks since boot

  static Process current();

  // False once it has ended, also as a zombie that its parent has not waited for: then none of its
  // threads touches memory any more. Where /proc tells nothing it counts as alive.
  bool is_alive() const;
};

// Which namespace this process's id is of: ids of different ones cannot be compared.
uint64_t pid_namespace();

}  // namespace mk::store
