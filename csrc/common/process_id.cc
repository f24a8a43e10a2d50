#include "common/process_id.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace mk {
namespace {

using Kept = std::atomic<pid_t>;

// Null if the machine does not support such pages. Never freed.
Kept* make_kept() {
  const size_t num_bytes = sysconf(_SC_PAGESIZE);
  void* const page =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  if (madvise(page, num_bytes, MADV_WIPEONFORK) == 0) return new (page) Kept(0);
  munmap(page, num_bytes);
  return nullptr;
}

}  // namespace

pid_t process_id() {
  static Kept* const kept = make_kept();
  if (!kept) return getpid();
  pid_t id = kept->load(std::memory_order_relaxed);
  if (id == 0) kept->store(id = getpid(), std::memory_order_relaxed);
  return id;
}

}  // namespace mk
