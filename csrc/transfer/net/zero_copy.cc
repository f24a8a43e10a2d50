#include "transfer/net/zero_copy.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "common/check.h"

namespace mk::transfer {
namespace {

// Of Linux 6.0 to 6.2: the headers that this is compiled with may be older than the kernel.
constexpr uint8_t kSendMessage = 48;          // IORING_OP_SENDMSG_ZC
constexpr uint16_t kReportUsage = 1 << 3;     // IORING_SEND_ZC_REPORT_USAGE
constexpr uint32_t kMore = 1 << 1;            // IORING_CQE_F_MORE: a notification will follow
constexpr uint32_t kIsNotification = 1 << 3;  // IORING_CQE_F_NOTIF
constexpr uint32_t kWasCopied = 1u << 31;     // IORING_NOTIF_USAGE_ZC_COPIED

// Each of these has at most two completions, for which a ring has room. A send is as much as fits
// the socket's buffer at that moment.
constexpr uint32_t kMaxInFlight = 64;

// A few sends may be copied on the way although most are not: seen with a NIC of QEMU's.
constexpr uint64_t kTrialBytes = 256 << 10;

}  // namespace

ZeroCopy::ZeroCopy() : ring_(kMaxInFlight) { in_flight_.reserve(kMaxInFlight); }

std::unique_ptr<ZeroCopy> ZeroCopy::make() {
  try {
    return std::make_unique<ZeroCopy>();
  } catch (const SystemError&) {
    return nullptr;  // what it is for works without
  }
}

ssize_t ZeroCopy::send(int fd, const msghdr& message, int flags) {
  flags |= MSG_DONTWAIT | MSG_NOSIGNAL;
  reap();
  if (!works_ || in_flight_.size() == kMaxInFlight) return sendmsg(fd, &message, flags);
  io_uring_sqe& entry = ring_.push();
  entry.opcode = kSendMessage;
  entry.ioprio = kReportUsage;
  entry.fd = fd;
  entry.addr = reinterpret_cast<uint64_t>(&message);
  entry.len = 1;
  entry.msg_flags = flags;
  entry.user_data = ++num_sent_;
  in_flight_.push_back({num_sent_, 0});
  const uint64_t num_results = num_results_;
  while (num_results_ == num_results) {
    if (ring_.enter(ring_.num_pushed(), 1) < 0 && errno != EINTR) {
      if (!ring_.take_back()) throw SystemError(errno, "io_uring_enter");
      in_flight_.pop_back();
      works_ = false;
      return sendmsg(fd, &message, flags);
    }
    reap();
  }
  if (result_ >= 0 || result_ == -EAGAIN) {
    errno = -result_;
    return result_ >= 0 ? result_ : -1;
  }
  // Too much memory is in the kernel's hands now (RLIMIT_MEMLOCK), or it is an old kernel's EINVAL.
  // What is wrong with the connection or the memory, sendmsg says as well.
  works_ = result_ == -ENOMEM || result_ == -ENOBUFS || result_ == -EFAULT;
  return sendmsg(fd, &message, flags);
}

bool ZeroCopy::settled(uint64_t mark) {
  reap();
  return in_flight_.empty() || in_flight_.front().number > mark;
}

void ZeroCopy::settle(uint64_t mark, const Limit& limit) {
  while (!settled(mark)) wait_ready(ring_.fd(), POLLIN, limit);
}

void ZeroCopy::settle_all(const Deadline& until) {
  while (!settled(num_sent_) && !until.passed()) {
    pollfd polled{ring_.fd(), POLLIN, 0};
    poll(&polled, 1, until.poll_ms());
  }
}

void ZeroCopy::reap() {
  io_uring_cqe done;
  while (ring_.pop(done)) {
    const auto send =
        std::find_if(in_flight_.begin(), in_flight_.end(),
                     [number = done.user_data](const Send& s) { return s.number == number; });
    if (done.flags & kIsNotification) {
      if (send == in_flight_.end()) continue;  // it took no byte, and says that these were copied
      const bool was_copied = static_cast<uint32_t>(done.res) & kWasCopied;
      (was_copied ? num_copied_ : num_uncopied_) += send->num_bytes;
      in_flight_.erase(send);
      if (num_copied_ > num_uncopied_ + kTrialBytes) works_ = false;
      continue;
    }
    ++num_results_;
    result_ = done.res;
    if (done.res > 0 && done.flags & kMore) {
      send->num_bytes = done.res;
    } else {
      in_flight_.erase(send);
    }
  }
}

}  // namespace mk::transfer
