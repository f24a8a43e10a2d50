// Uring: the queues of an io_uring(7), which are shared with the kernel; by the system calls
// directly.
//
//   Uring ring(64);
//   ring.push().opcode = IORING_OP_NOP;
//   ring.enter(ring.num_pushed(), 1);    // submits, and waits for a completion
//   io_uring_cqe done;
//   while (ring.pop(done)) ...
//
// Layer: transfer. One thread at a time.
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>

#include "common/fd.h"

namespace mk::transfer {

class Uring {
 public:
  // `num_entries` is a power of two; twice as many completions have room, and more are never
  // dropped. Throws SystemError: ENOSYS, EPERM, ...
  explicit Uring(uint32_t num_entries);

  // A new entry of zeros, of which at most `num_entries` may be pushed at a time.
  io_uring_sqe& push();
  uint32_t num_pushed();            // those that the kernel has still to take
  const io_uring_sqe* take_back();  // the last of them; null if there is none
  bool pop(io_uring_cqe& done);     // the next completion, if there is one
  // io_uring_enter(2), with its result and errno.
  int enter(uint32_t num_to_submit, uint32_t num_to_wait_for) const;
  int fd() const { return fd_.get(); }  // for poll(2): readable once there is a completion

 private:
  // Memory that is shared with the kernel. Forked children do not have it.
  class Mapping {
   public:
    Mapping() = default;
    Mapping(const Fd& ring, uint64_t what, size_t num_bytes);
    Mapping(const Mapping&) = delete;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping();

    template <class T>
    T* at(size_t offset) const {
      return reinterpret_cast<T*>(data_ + offset);
    }

   private:
    char* data_ = nullptr;
    size_t num_bytes_ = 0;
  };

  io_uring_sqe& entry(uint32_t number) const {
    return entries_.at<io_uring_sqe>(0)[number & submit_mask_];
  }

  Fd fd_;
  Mapping rings_, entries_;
  uint32_t* submit_head_;
  uint32_t* submit_tail_;
  uint32_t submit_mask_;
  uint32_t tail_ = 0;  // after the last push; *submit_tail_ lags behind until num_pushed()
  uint32_t* done_head_;
  uint32_t* done_tail_;
  uint32_t done_mask_;
  const io_uring_cqe* done_;
};

}  // namespace mk::transfer
