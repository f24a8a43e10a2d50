// IoRing: an IoQueue by io_uring(7), using the system calls directly.
//
// Layer: transfer. The kernel reads and writes the memory of a call until the call is done. So the
// destructor cancels pending calls, and waits for those that the disk has begun. That takes as long
// as the disk does: memory cannot be taken away from a disk.
#pragma once

#include <linux/io_uring.h>

#include <cstdint>
#include <vector>

#include "common/fd.h"
#include "transfer/file/io_queue.h"

namespace mk::transfer {

class IoRing : public IoQueue {
 public:
  // `num_slots` is a power of two. Throws SystemError: ENOSYS, EPERM, ...
  explicit IoRing(size_t num_slots);
  IoRing(const IoRing&) = delete;
  ~IoRing() override;

  size_t num_slots() const override { return slots_.size(); }
  void push(size_t slot, const IoCall& call) override;
  IoDone next(const Limit& limit) override;

 private:
  enum class Slot : uint8_t { kFree, kSync, kMemory };  // kMemory: the kernel may touch memory

  // Memory that is shared with the kernel.
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

  void free_slot(size_t slot);
  io_uring_sqe& new_entry();
  void submit();
  bool pop(IoDone& done);
  void withdraw();    // what is not submitted yet
  void cancel_all();  // what is
  int enter(unsigned num_to_submit, unsigned num_to_wait_for) const;

  Fd fd_;
  Mapping rings_, entries_;
  uint32_t* submit_head_;
  uint32_t* submit_tail_;
  uint32_t submit_mask_;
  uint32_t tail_ = 0;  // after the last push; *submit_tail_ lags behind until submit()
  uint32_t* done_head_;
  uint32_t* done_tail_;
  uint32_t done_mask_;
  const io_uring_cqe* done_;

  std::vector<Slot> slots_;
  size_t num_used_ = 0;      // those that are not free
  size_t num_touching_ = 0;  // those that are kMemory
};

}  // namespace mk::transfer
