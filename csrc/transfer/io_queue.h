// IoQueue: reads, writes and syncs of files, as many under way at a time as it has slots.
//
//   const std::unique_ptr<IoQueue> queue = make_io_queue(64);
//   queue->push(3, {IoCall::Kind::kRead, fd, offset, parts, num_parts});   // slot 3 is free
//   const IoDone done = queue->next(limit);                                // slot 3 is free again
//
// Layer: transfer. One thread. When it is destroyed, nothing that was pushed touches memory.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transfer/limit.h"

namespace mk::transfer {

// `parts` stay as they are until it is done.
struct IoCall {
  enum class Kind { kRead, kWrite, kSync };
  Kind kind;
  int fd;
  uint64_t offset;
  const iovec* parts;
  size_t num_parts;
  int device = -1;  // the GPU, whose memory all parts are; -1: the host's
};

struct IoDone {
  size_t slot;
  int64_t result;  // bytes, or an error number below 0
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;

  virtual size_t num_slots() const = 0;

  // Takes a call; it begins at the latest when next() waits.
  virtual void push(size_t slot, const IoCall& call) = 0;

  // Waits until one of those that were pushed is done, whichever. Throws Ended, SystemError.
  virtual IoDone next(const Limit& limit) = 0;
};

// One by io_uring(7); where that is not to be had (an old kernel, a container that forbids it), one
// of a single slot, whose calls are made in the thread that waits. Throws SystemError.
std::unique_ptr<IoQueue> make_io_queue(size_t num_slots);

}  // namespace mk::transfer
