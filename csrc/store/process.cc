#include "store/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "common/check.h"
#include "common/fd.h"

namespace mk::store {
namespace {

struct Status {
  char state;
  uint64_t num_threads;
  uint64_t start_time;
};

// Fields 3, 20 and 22 of /proc/<pid>/stat, see proc(5).
std::optional<Status> status_of(uint64_t pid) {
  const Fd file(open(concat("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  char text[1024];
  const ssize_t size = read(file.get(), text, sizeof(text));
  if (size <= 0) return std::nullopt;
  const std::string line(text, static_cast<size_t>(size));
  const size_t name_end = line.rfind(')');  // the name may contain brackets and blanks
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  Status status{};
  std::string skipped;
  fields >> status.state;
  for (int field = 4; field < 20; ++field) fields >> skipped;
  fields >> status.num_threads >> skipped >> status.start_time;
  if (!fields) return std::nullopt;
  return status;
}

}  // namespace

Process Process::current() {
  const uint64_t pid = static_cast<uint64_t>(getpid());
  const auto status = status_of(pid);
  if (!status) throw Unavailable("store: /proc must be readable, to tell who is alive");
  return {pid, status->start_time};
}

bool Process::is_alive() const {
  if (pid > INT32_MAX) return false;  // the kernel has no such ids
  const auto status = status_of(pid);
  if (!status) return !(kill(static_cast<pid_t>(pid), 0) < 0 && errno == ESRCH);
  if (status->start_time != start_time) return false;
  // 'Z' or 'X' alone: if only its first thread has ended, a process still has other threads.
  const bool has_ended = status->state == 'Z' || status->state == 'X';
  return !has_ended || status->num_threads > 1;
}

uint64_t pid_namespace() {
  struct stat about;
  MK_SYSCALL(stat("/proc/self/ns/pid", &about), "stat /proc/self/ns/pid");
  return about.st_ino;
}

uint64_t boot() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");  // 8-4-4-4-12 hexadecimal digits
  std::string id;
  file >> id;
  id.erase(std::remove(id.begin(), id.end(), '-'), id.end());
  return id.size() == 32 ? std::stoull(id.substr(0, 16), nullptr, 16) : 0;
}

}  // namespace mk::store
