// Process: identifies a process, so that others can tell later whether it still lives: a process id
// alone is reused after its owner's death.
//
//   const Process me = Process::current();
//   if (!other.is_alive()) take_back_what_it_held(other);
//
// Layer: store.
#pragma once

#include <cstdint>

namespace mk::store {

struct Process {
  uint64_t pid;         // 0: none
  uint64_t start_time;  // of its first thread, in the kernel's ticks since boot

  static Process current();

  // False once it has ended, even as an unreaped zombie: then none of its threads touches memory
  // any more. If /proc gives no answer, it counts as alive.
  bool is_alive() const;
};

// The namespace of this process's id: ids of different namespaces cannot be compared.
uint64_t pid_namespace();

// Identifies the time since this machine was started, by half of the kernel's id of it: ids and
// mutexes of an earlier one mean nothing. 0 where the kernel does not tell.
uint64_t boot();

}  // namespace mk::store
