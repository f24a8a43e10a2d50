#include "rdma/registration_error.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <ios>
#include <sstream>

#include "common/check.h"

namespace mk::rdma {
namespace {

std::string hex(uint64_t value) {
  std::ostringstream out;
  out << "0x" << std::hex << value;
  return out.str();
}

// What is wrong with that memory's mapping in this process; empty if nothing is.
std::string explain_mapping(Span span, bool writable) {
  std::ifstream maps("/proc/self/maps");
  uint64_t at = span.address;
  for (std::string line; at < span.end() && std::getline(maps, line);) {
    std::istringstream words(line);
    uint64_t begin = 0, end = 0;
    char dash = 0;
    std::string rights, offset, device, inode, file;
    words >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> inode >> file;
    if (end <= at) continue;
    if (begin > at) break;
    const std::string of = file.empty() ? "" : concat(" (", file, ")");
    if (rights[0] != 'r') return concat(hex(at), of, " may not be read by this process");
    if (writable && rights[1] != 'w') {
      return concat(hex(at), of, " may not be written by this process: register it for reading");
    }
    if (file.rfind("/dev/", 0) == 0 && file.rfind("/dev/shm/", 0) != 0 && file != "/dev/zero") {
      return concat(hex(at), of, " is memory of a device, which cannot be pinned");
    }
    at = end;
  }
  if (at < span.end()) return concat(hex(at), " is not mapped in this process (freed?)");
  return "";
}

// Whether this thread may lock memory beyond its limit: CAP_IPC_LOCK, of the first user namespace.
bool is_above_limit() {
  constexpr int kIpcLock = 14;
  std::ifstream map("/proc/self/uid_map");
  uint64_t inside = 1, outside = 1, count = 0;
  if (!(map >> inside >> outside >> count) || inside != 0 || outside != 0 || count != UINT32_MAX) {
    return false;
  }
  std::ifstream status("/proc/thread-self/status");
  for (std::string word; status >> word;) {
    uint64_t capabilities = 0;
    if (word == "CapEff:")
      return status >> std::hex >> capabilities && capabilities >> kIpcLock & 1;
  }
  return false;
}

std::string explain_limits(const DeviceInfo& device) {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur != RLIM_INFINITY && !is_above_limit()) {
    return concat("this process may lock ", limit.rlim_cur,
                  " bytes of memory (RLIMIT_MEMLOCK): raise it with `ulimit -l unlimited`, "
                  "LimitMEMLOCK=infinity of systemd or --ulimit memlock=-1 of docker");
  }
  return concat("out of memory to pin, or the device holds its ", device.max_mr,
                " regions already");
}

}  // namespace

std::string explain_registration(int error, const DeviceInfo& device, Span span, bool writable) {
  std::string cause;
  if (error == EFAULT || error == EINVAL || error == EACCES || error == EPERM) {
    cause = explain_mapping(span, writable);
  }
  if (error == ENOMEM) cause = explain_limits(device);
  if (cause.empty() && error == EINVAL) {
    cause = concat("a region of the device has at most ", device.max_mr_bytes, " bytes");
  }
  if (cause.empty() && error == EFAULT) {
    cause = "mapped, but its pages cannot be pinned (memory of a device, or a file that was cut?)";
  }
  const std::string what =
      concat(span.num_bytes, " bytes at ", hex(span.address), " on ", device.name);
  return cause.empty() ? what : concat(what, ": ", cause);
}

}  // namespace mk::rdma
