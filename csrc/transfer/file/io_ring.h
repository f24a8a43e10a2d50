// IoRing: an IoQueue by io_uring(7).
//
// Layer: transfer. The kernel reads and writes the memory of a call until the call is done. So the
// destructor cancels pending calls, and waits for those that the disk has begun. That takes as long
// as the disk does: memory cannot be taken away from a disk.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/base/uring.h"
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

  void free_slot(size_t slot);
  void submit();
  bool pop(IoDone& done);
  void withdraw();    // what is not submitted yet
  void cancel_all();  // what is

  Uring ring_;
  std::vector<Slot> slots_;
  size_t num_used_ = 0;      // those that are not free
  size_t num_touching_ = 0;  // those that are kMemory
};

}  // namespace mk::transfer
