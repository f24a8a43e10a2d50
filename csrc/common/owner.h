// Owner: the process that created an object. In a forked child the object's threads do not exist,
// and its eventfds, sockets and NIC handles are shared with the parent.
//
// Layer: common.
#pragma once

#include "common/check.h"
#include "common/process_id.h"

namespace mk {

class Owner {
 public:
  bool forked() const { return process_id() != pid_; }

  // Throws InvalidArgument in a forked child.
  void check(const char* op, const char* argument) const {
    MK_CHECK(!forked(), op, ": ", argument, " must be used in the process that made it, ", pid_,
             ", got ", process_id());
  }

 private:
  const pid_t pid_ = process_id();
};

}  // namespace mk
