#include "transfer/shm/liveness.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace mk::transfer {

Liveness::Liveness(std::atomic<uint32_t>& word) : word_(word) {
  list_.list.next = &entry_;
  entry_.next = &list_.list;
  list_.futex_offset = reinterpret_cast<char*>(&word_) - reinterpret_cast<char*>(&entry_);
  list_.list_op_pending = nullptr;
  if (syscall(SYS_get_robust_list, 0, &before_, &before_bytes_) != 0) return;
  if (syscall(SYS_set_robust_list, &list_, sizeof(list_)) != 0) return;
  word_.store(static_cast<uint32_t>(syscall(SYS_gettid)));
}

Liveness::~Liveness() {
  word_.store(0);
  if (before_bytes_ != 0) syscall(SYS_set_robust_list, before_, before_bytes_);
}

}  // namespace mk::transfer
