// ZeroCopy: sends memory by TCP without copying it first: the NIC reads it (IORING_OP_SENDMSG_ZC,
// of Linux 6.2).
//
//   std::unique_ptr<ZeroCopy> zero_copy = ZeroCopy::make();   // null: not here
//   zero_copy->send(fd, message, 0);                          // as sendmsg(2)
//   const uint64_t mark = zero_copy->num_sent();
//   zero_copy->settle(mark, limit);                           // now the memory may change
//
// Layer: transfer. One thread at a time. The kernel tells the thread that sent when it is done with
// the memory, which ends a system call that is never restarted, such as epoll_wait(2), with EINTR.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transfer/base/limit.h"
#include "transfer/base/uring.h"

namespace mk::transfer {

class ZeroCopy {
 public:
  ZeroCopy();                               // throws SystemError
  static std::unique_ptr<ZeroCopy> make();  // null where the kernel or a container has no io_uring

  // As a sendmsg(2) that neither blocks nor raises SIGPIPE, and by one where the kernel cannot do
  // better. The bytes that it takes must not change until they are settled.
  ssize_t send(int fd, const msghdr& message, int flags);

  // Whether it is worth it: the kernel knows how, and does not copy most of it after all, as on the
  // way to another container of this machine.
  bool works() const { return works_; }

  uint64_t num_sent() const { return num_sent_; }  // a mark, after what is sent by now
  bool settled(uint64_t mark);  // whether the kernel is done with all that was sent before it
  void settle(uint64_t mark, const Limit& limit);  // waits until it is; throws Ended
  void settle_all(const Deadline& until);          // waits until then at most

 private:
  struct Send {
    uint64_t number;
    uint64_t num_bytes;
  };

  void reap();

  Uring ring_;
  bool works_ = true;
  uint64_t num_sent_ = 0;
  int result_ = 0;               // of the last send that completed
  uint64_t num_results_ = 0;     // one per send
  std::vector<Send> in_flight_;  // those whose memory the kernel still has, in order
  uint64_t num_copied_ = 0;      // bytes that the kernel has copied, of those that it is done with
  uint64_t num_uncopied_ = 0;    // the others
};

}  // namespace mk::transfer
