// IoQueue: reads, writes and syncs of files, with as many in flight as it has slots.
//
//   const std::unique_ptr<IoQueue> queue = make_io_queue(64);
//   queue->push(3, {IoCall::Kind::kRead, fd, offset, parts, num_parts});   // slot 3 is free
//   const IoDone done = queue->next(limit);                                // slot 3 is free again
//
// Layer: transfer. One thread. Once it is destroyed, no pushed call touches memory.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transfer/base/limit.h"

namespace mk::transfer {

// `parts` must not change until it is done.
struct IoCall {
  enum class Kind { kRead, kWrite, kSync };
  Kind kind;
  int fd;
  uint64_t offset;
  const iovec* parts;
  size_t num_parts;
  int device = -1;  // the GPU that holds all parts; -1: host memory
};

struct IoDone {
  size_t slot;
  int64_t result;  // bytes, or an error number below 0
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;

  virtual size_t num_slots() const = 0;

  // Takes a call; it begins no later than when next() waits.
  virtual void push(size_t slot, const IoCall& call) = 0;

  // Waits until any pushed call is done. Throws Ended, SystemError.
  virtual IoDone next(const Limit& limit) = 0;
};

// One by io_uring(7). If that is not available (an old kernel, a container that forbids it), one of
// a single slot, whose calls are made in the thread that waits. Throws SystemError.
std::unique_ptr<IoQueue> make_io_queue(size_t num_slots);

}  // namespace mk::transfer
