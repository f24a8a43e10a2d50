#include "transfer/net/local_users.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>

namespace mk::transfer {
namespace {

constexpr uid_t kUsualOverflow = 65534;
constexpr uint64_t kAllUsers = 0xffffffff;

uid_t overflow_user() {
  static const uid_t known = [] {
    std::ifstream file("/proc/sys/kernel/overflowuid");
    uid_t user = 0;
    return file >> user ? user : kUsualOverflow;
  }();
  return known;
}

// As in the initial user namespace: then no user is shown as another one.
bool maps_all_users() {
  std::ifstream file("/proc/self/uid_map");
  uint64_t inside = 0, outside = 0, count = 0;
  return file >> inside >> outside >> count && inside == 0 && outside == 0 && count == kAllUsers;
}

bool is_somebody(uid_t user) { return user != overflow_user() || maps_all_users(); }

}  // namespace

bool LocalUsers::admit(uid_t user) const {
  if (is_own_user(user)) return true;
  const bool is_listed = std::find(others_.begin(), others_.end(), user) != others_.end();
  return is_listed && is_somebody(user);
}

bool is_own_user(uid_t user) { return user == geteuid() && is_somebody(user); }

}  // namespace mk::transfer
