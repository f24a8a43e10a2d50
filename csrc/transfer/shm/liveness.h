// Liveness: a word of shared memory that tells another process, without a system call, that a
// thread of this one is still at its work.
//
//   const Liveness sign(word);               // here; lowered with this object or with the thread
//   if (Liveness::is_alive(word)) trust();  // in the other process
//
// Layer: transfer. If the thread ends in any other way, such as by a kill of its process, the
// kernel lowers the word (robust futexes, set_robust_list(2)) before the death can be observed by
// waiting for the process or for its connections to end. If the kernel has no such lists, the word
// is never raised. The kernel takes one list per thread: while the sign is raised, the thread must
// take no robust mutex.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mk::transfer {

class Liveness {
 public:
  // For the calling thread, which must also be the one to end it, and has one at a time.
  explicit Liveness(std::atomic<uint32_t>& word);
  Liveness(const Liveness&) = delete;
  ~Liveness();

  static bool is_alive(const std::atomic<uint32_t>& word) {
    return (word.load() & FUTEX_TID_MASK) != 0;
  }

 private:
  std::atomic<uint32_t>& word_;
  // Not next to the word, in shared memory: the other process could corrupt the list.
  robust_list entry_;
  robust_list_head list_;
  robust_list_head* before_ = nullptr;  // the thread's own
  size_t before_bytes_ = 0;
};

}  // namespace mk::transfer
