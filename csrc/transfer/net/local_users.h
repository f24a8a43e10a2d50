// LocalUsers: which users of this machine may use an engine's socket within the machine, and whom
// an engine speaks to over one.
//
//   const LocalUsers users({1000});
//   users.admit(credentials.uid)     // ours, or 1000
//
// Layer: transfer. Users are those of this process's user namespace. The kernel shows every user
// that the namespace does not map as the overflow user (65534), which is then no one in particular:
// it is neither ours nor admitted, even if this process runs as the overflow user itself.
#pragma once

#include <sys/types.h>

#include <utility>
#include <vector>

namespace mk::transfer {

class LocalUsers {
 public:
  LocalUsers() = default;
  explicit LocalUsers(std::vector<uid_t> others) : others_(std::move(others)) {}

  bool admit(uid_t user) const;  // is it ours, or listed?

 private:
  std::vector<uid_t> others_;
};

// Whether that is the user that this process runs as (its effective user).
bool is_own_user(uid_t user);

}  // namespace mk::transfer
