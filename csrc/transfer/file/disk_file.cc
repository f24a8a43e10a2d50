#include "transfer/file/disk_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "common/check.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

constexpr char kPrefix[] = "file:";
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kUsualAlign = 4096;  // if the kernel does not say: no disk requires more

[[noreturn]] void fail(const char* what, int error_number) {
  throw Failure(reason_of_errno(error_number, what));
}

// Checked before opening: opening a pipe waits for its other end, and opening a tape rewinds it.
mode_t kind_of(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) < 0) fail("stat", errno);
  return info.st_mode & S_IFMT;
}

bool same_file(const Fd& a, const Fd& b) {
  struct stat of_a, of_b;
  return fstat(a.get(), &of_a) == 0 && fstat(b.get(), &of_b) == 0 && of_a.st_dev == of_b.st_dev &&
         of_a.st_ino == of_b.st_ino;
}

// What the kernel (6.1 and later) requires for O_DIRECT; zeros if it is not supported for this
// file.
DirectRules rules_of(const Fd& fd) {
#ifdef STATX_DIOALIGN
  struct statx info{};
  if (statx(fd.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      info.stx_mask & STATX_DIOALIGN) {
    return {info.stx_dio_offset_align, info.stx_dio_mem_align};
  }
#endif
  return {kUsualAlign, kUsualAlign};
}

}  // namespace

std::string path_of_file(const std::string& name) {
  const size_t num_prefix = sizeof(kPrefix) - 1;
  std::string path = name.compare(0, num_prefix, kPrefix) == 0 ? name.substr(num_prefix) : "";
  MK_CHECK(!path.empty() && path[0] == '/' && path.find('\0') == std::string::npos,
           "open: name must have an absolute path after file:, got \"", name, "\"");
  return path;
}

DiskFile::DiskFile(const std::string& path) {
  const mode_t kind = kind_of(path);
  is_device_ = kind == S_IFBLK;
  if (!is_device_ && kind != S_IFREG) {
    throw Failure(concat("it must be a regular file or a block device, got ",
                         kind == S_IFDIR ? "a directory" : "something else"),
                  FailureKind::kRefused);
  }
  int access = O_RDWR;
  buffered_ = Fd(open(path.c_str(), access | O_CLOEXEC));
  if (!buffered_ && (errno == EACCES || errno == EROFS || errno == EPERM || errno == ETXTBSY)) {
    read_only_ = std::generic_category().message(errno);
    access = O_RDONLY;
    buffered_ = Fd(open(path.c_str(), access | O_CLOEXEC));
  }
  if (!buffered_) fail("open", errno);
  // Only the ends of blocks go through the cache: what follows them will not be read, and they
  // should be cached page by page, see file_op.h.
  posix_fadvise(buffered_.get(), 0, 0, POSIX_FADV_RANDOM);
  open_direct(path, access);
}

// Without O_DIRECT (tmpfs) everything goes through the page cache.
void DiskFile::open_direct(const std::string& path, int access) {
  Fd direct(open(path.c_str(), access | O_CLOEXEC | O_DIRECT));
  if (!direct || !same_file(direct, buffered_)) return;
  rules_ = rules_of(direct);
  if (rules_.file_align == 0) return;
  rules_.file_align = std::max(rules_.file_align, kPageBytes);
  direct_ = std::move(direct);
}

uint64_t DiskFile::num_bytes() const {
  if (is_device_) {
    uint64_t num_bytes;
    MK_SYSCALL(ioctl(buffered_.get(), BLKGETSIZE64, &num_bytes), "BLKGETSIZE64");
    return num_bytes;
  }
  struct stat info;
  MK_SYSCALL(fstat(buffered_.get(), &info), "fstat");
  return static_cast<uint64_t>(info.st_size);
}

const GpuFile* DiskFile::gpu_file() const {
  const std::lock_guard lock(gpu_mutex_);
  if (!std::exchange(has_looked_, true)) {
    if (direct_) {
      gpu_file_ = GpuFile::of(direct_.get(), why_no_gpu_file_);
    } else {
      why_no_gpu_file_ = "the file has no O_DIRECT";
    }
  }
  return why_no_gpu_file_.empty() ? gpu_file_.get() : nullptr;
}

std::string DiskFile::why_no_gpu_file() const {
  const std::lock_guard lock(gpu_mutex_);
  return why_no_gpu_file_;
}

void DiskFile::give_up_gpu_file(const std::string& why) const {
  const std::lock_guard lock(gpu_mutex_);
  if (why_no_gpu_file_.empty()) why_no_gpu_file_ = why;
}

}  // namespace mk::transfer
