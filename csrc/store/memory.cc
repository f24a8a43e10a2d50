#include "store/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "common/check.h"

namespace mk::store {
namespace {

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

}  // namespace

std::unique_ptr<PoolMemory> PoolMemory::create(const std::string& path, uint64_t num_bytes,
                                               const std::function<void(char* base)>& init) {
  std::unique_ptr<PoolMemory> memory(new PoolMemory);
  memory->num_bytes_ = num_bytes;
  if (path.empty()) {
    memory->nameless_ = std::make_unique<SharedMemory>(num_bytes);
    memory->data_ = memory->nameless_->data();
    memory->path_ = concat("/proc/", getpid(), "/fd/", memory->nameless_->fd().get());
    init(memory->data_);
    return memory;
  }
  if (access(path.c_str(), F_OK) == 0) throw SystemError(EEXIST, "create " + path);
  // Named only once it is complete: a crash before that leaves nothing.
  const int flags = O_TMPFILE | O_RDWR | O_CLOEXEC;
  memory->file_ = Fd(MK_SYSCALL(::open(folder_of(path).c_str(), flags, 0600), "create " + path));
  const int error = posix_fallocate(memory->file_.get(), 0, static_cast<off_t>(num_bytes));
  if (error != 0) throw SystemError(error, concat("reserve ", num_bytes, " bytes for ", path));
  memory->path_ = path;
  memory->map();
  init(memory->data_);
  const std::string open_file = concat("/proc/self/fd/", memory->file_.get());
  MK_SYSCALL(linkat(AT_FDCWD, open_file.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW),
             "create " + path);
  return memory;
}

std::unique_ptr<PoolMemory> PoolMemory::open(const std::string& path) {
  std::unique_ptr<PoolMemory> memory(new PoolMemory);
  memory->path_ = path;
  memory->file_ = Fd(MK_SYSCALL(::open(path.c_str(), O_RDWR | O_CLOEXEC), "open " + path));
  struct stat about;
  MK_SYSCALL(fstat(memory->file_.get(), &about), "fstat");
  MK_CHECK(S_ISREG(about.st_mode) && about.st_size > 0,
           "ObjectPool.open: path must be the memory of a pool, got ", path);
  memory->num_bytes_ = static_cast<uint64_t>(about.st_size);
  memory->map();
  return memory;
}

void PoolMemory::map() {
  void* const at = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (at == MAP_FAILED) throw SystemError(errno, "mmap " + path_);
  data_ = static_cast<char*>(at);
  madvise(at, num_bytes_, MADV_HUGEPAGE);  // if the machine allows that for shared memory
}

PoolMemory::~PoolMemory() {
  if (data_ && !nameless_) munmap(data_, num_bytes_);
}

}  // namespace mk::store
