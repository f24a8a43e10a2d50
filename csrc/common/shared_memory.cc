#include "common/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <iterator>
#include <map>
#include <mutex>

#include "common/check.h"
#include "common/fork.h"

namespace mk {
namespace {

struct Made {
  std::mutex mutex;
  std::map<uint64_t, const SharedMemory*> by_address;
  uint64_t num_made = 0;
};

std::mutex& made_mutex();

// Never destroyed: threads may look things up while the process exits.
Made& made() {
  static Made* const instance = [] {
    hold_over_fork<made_mutex>();
    return new Made;
  }();
  return *instance;
}

std::mutex& made_mutex() { return made().mutex; }

}  // namespace

SharedMemory::SharedMemory(uint64_t num_bytes) : num_bytes_(num_bytes) {
  MK_CHECK(num_bytes > 0 && num_bytes <= INT64_MAX,
           "SharedMemory: num_bytes must be positive, got ", num_bytes);
  fd_ = Fd(MK_SYSCALL(memfd_create("mooncake_kernels", MFD_CLOEXEC | MFD_ALLOW_SEALING),
                      "memfd_create"));
  MK_SYSCALL(fchmod(fd_.get(), 0600), "fchmod");
  MK_SYSCALL(ftruncate(fd_.get(), static_cast<off_t>(num_bytes)), "ftruncate");
  // Otherwise a process could shorten it and thereby kill all others that touch the removed part.
  MK_SYSCALL(fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), "fcntl");
  map(fd_.get());
  const std::lock_guard lock(made().mutex);
  id_ = ++made().num_made;
  made().by_address[reinterpret_cast<uint64_t>(data_)] = this;
}

SharedMemory::SharedMemory(const Fd& fd) {
  struct stat about;
  MK_SYSCALL(fstat(fd.get(), &about), "fstat");
  const int seals = MK_SYSCALL(fcntl(fd.get(), F_GET_SEALS), "fcntl");
  if (!(seals & F_SEAL_SHRINK)) throw SystemError(EINVAL, "map memory that may be shortened");
  num_bytes_ = about.st_size;
  map(fd.get());
}

void SharedMemory::map(int fd) {
  void* const at = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) throw SystemError(errno, "mmap");
  data_ = static_cast<char*>(at);
  madvise(at, num_bytes_, MADV_HUGEPAGE);  // if the machine allows that for shared memory
}

SharedMemory::~SharedMemory() {
  if (fd_) {
    const std::lock_guard lock(made().mutex);
    made().by_address.erase(reinterpret_cast<uint64_t>(data_));
  }
  if (data_) munmap(data_, num_bytes_);
}

std::optional<SharedMemory::Part> SharedMemory::find(uint64_t address, uint64_t num_bytes) {
  const std::lock_guard lock(made().mutex);
  const auto behind = made().by_address.upper_bound(address);
  if (behind == made().by_address.begin()) return std::nullopt;
  const SharedMemory& memory = *std::prev(behind)->second;
  const uint64_t offset = address - reinterpret_cast<uint64_t>(memory.data());
  if (offset > memory.num_bytes() || num_bytes > memory.num_bytes() - offset) return std::nullopt;
  return Part{Fd(MK_SYSCALL(fcntl(memory.fd().get(), F_DUPFD_CLOEXEC, 0), "fcntl")), memory.id_,
              offset};
}

}  // namespace mk
