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

std::string name_of(int fd) { return concat("/proc/self/fd/", fd); }

// That of nameless memory, which is a link: /proc/<process>/fd/<number>.
bool is_nameless(const std::string& path) {
  const auto skip_digits = [&](size_t at) { return path.find_first_not_of("0123456789", at); };
  const std::string process = "/proc/", descriptor = "/fd/";
  if (path.compare(0, process.size(), process) != 0) return false;
  const size_t id_end = skip_digits(process.size());
  if (id_end == std::string::npos || id_end == process.size()) return false;
  const size_t number = id_end + descriptor.size();
  return path.compare(id_end, descriptor.size(), descriptor) == 0 && number < path.size() &&
         skip_digits(number) == std::string::npos;
}

const char* kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFLNK:
      return "a link";
    case S_IFDIR:
      return "a folder";
    case S_IFIFO:
      return "a FIFO";
    case S_IFSOCK:
      return "a socket";
    default:
      return "a device";
  }
}

// Of a file that is open: its name may be of another one by now.
void check(const std::string& path, const struct stat& about, const Trust& trust) {
  const char* const op = "ObjectPool.open: path must be ";
  MK_CHECK(S_ISREG(about.st_mode), op, "the memory of a pool, got ", path, ", which is ",
           kind_of(about.st_mode));
  const uint32_t owner = trust.owner.value_or(geteuid());
  MK_CHECK(about.st_uid == owner, op, "a file of user ", owner, " (this process's, unless owner ",
           "is given), got ", path, " of user ", about.st_uid);
  const uint32_t mode = about.st_mode & 07777;
  const auto octal = [&] { return concat("0", mode >> 6 & 7, mode >> 3 & 7, mode & 7); };
  MK_CHECK((mode & S_IWOTH) == 0, op, "a file that not everyone can write, got ", path,
           " with mode ", octal());
  MK_CHECK((mode & S_IWGRP) == 0 || trust.group, op, "a file that only its owner can write, ",
           "unless group is given, got ", path, " with mode ", octal());
  MK_CHECK((mode & S_IWGRP) == 0 || about.st_gid == *trust.group, op, "a file that only group ",
           *trust.group, " can write, got ", path, " of group ", about.st_gid);
  MK_CHECK(about.st_nlink <= 1, op, "the only name of a file, got ", path, ", which is one of ",
           about.st_nlink, " (hard links)");
  MK_CHECK(about.st_size > 0, op, "the memory of a pool, got ", path, ", which is empty");
}

}  // namespace

std::unique_ptr<PoolMemory> PoolMemory::create(const std::string& path, uint64_t num_bytes,
                                               std::optional<uint32_t> group,
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
  struct stat about;
  if (lstat(path.c_str(), &about) == 0) throw SystemError(EEXIST, "create " + path);
  // Named only once it is complete: a crash before that leaves nothing.
  const int flags = O_TMPFILE | O_RDWR | O_CLOEXEC;
  memory->file_ = Fd(MK_SYSCALL(::open(folder_of(path).c_str(), flags, 0600), "create " + path));
  const int file = memory->file_.get();
  if (group) {
    MK_SYSCALL(fchown(file, -1, *group), concat("give ", path, " to group ", *group));
  }
  MK_SYSCALL(fchmod(file, group ? 0660 : 0600), "fchmod");
  const int error = posix_fallocate(file, 0, static_cast<off_t>(num_bytes));
  if (error != 0) throw SystemError(error, concat("reserve ", num_bytes, " bytes for ", path));
  memory->path_ = path;
  memory->map();
  init(memory->data_);
  MK_SYSCALL(linkat(AT_FDCWD, name_of(file).c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW),
             "create " + path);
  return memory;
}

// First as a place, which neither follows a link, nor has an effect on a FIFO or a device.
std::unique_ptr<PoolMemory> PoolMemory::open(const std::string& path, const Trust& trust) {
  const int no_link = is_nameless(path) ? 0 : O_NOFOLLOW;
  const Fd place(MK_SYSCALL(::open(path.c_str(), O_PATH | no_link | O_CLOEXEC), "open " + path));
  struct stat about;
  MK_SYSCALL(fstat(place.get(), &about), "fstat");
  check(path, about, trust);
  std::unique_ptr<PoolMemory> memory(new PoolMemory);
  memory->path_ = path;
  memory->file_ =
      Fd(MK_SYSCALL(::open(name_of(place.get()).c_str(), O_RDWR | O_CLOEXEC), "open " + path));
  memory->num_bytes_ = static_cast<uint64_t>(about.st_size);
  memory->map();
  return memory;
}

Fd PoolMemory::reopen() const {
  const int file = nameless_ ? nameless_->fd().get() : file_.get();
  return Fd(MK_SYSCALL(::open(name_of(file).c_str(), O_RDWR | O_CLOEXEC), "open " + path_));
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
