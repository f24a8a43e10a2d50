#include "transfer/peer/completions.h"

#include <sys/eventfd.h>

#include <utility>

#include "common/check.h"

namespace mk::transfer {

CompletionQueue::CompletionQueue()
    : event_(MK_SYSCALL(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {}

void CompletionQueue::push(uint64_t key) {
  const std::lock_guard lock(mutex_);
  keys_.push_back(key);
  eventfd_write(event_.get(), 1);
}

std::vector<uint64_t> CompletionQueue::take() {
  const std::lock_guard lock(mutex_);
  eventfd_t count;
  eventfd_read(event_.get(), &count);
  return std::exchange(keys_, {});
}

}  // namespace mk::transfer
