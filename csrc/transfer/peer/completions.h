// CompletionQueue: the finished ones of many tickets, signalled by one file descriptor.
//
//   CompletionQueue queue;
//   ticket->push_when_finished(queue, 7);       // from any thread
//   poll queue.fd(); for (uint64_t key : queue.take()) ...
//
// Layer: transfer. Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "common/fd.h"

namespace mk::transfer {

class CompletionQueue {
 public:
  CompletionQueue();

  int fd() const { return event_.get(); }  // readable while there is something to take
  void push(uint64_t key);                 // never blocks
  std::vector<uint64_t> take();            // all there are; never blocks

 private:
  const Fd event_;
  std::mutex mutex_;
  std::vector<uint64_t> keys_;
};

}  // namespace mk::transfer
