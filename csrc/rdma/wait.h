// Waits for a file descriptor, until interrupted.
//
// Layer: rdma.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>

#include "common/check.h"

namespace mk::rdma {

// Whether `fd` becomes readable within `timeout_s`; false as soon as `leave` (an eventfd) is.
inline bool wait_readable(int fd, int leave, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(std::min(timeout_s, 1e9));
  pollfd fds[] = {{fd, POLLIN, 0}, {leave, POLLIN, 0}};
  while (true) {
    const double left_s = std::chrono::duration<double>(until - Clock::now()).count();
    const int left_ms = static_cast<int>(std::min(std::ceil(std::max(left_s, 0.0) * 1e3), 1e6));
    const int ready = poll(fds, 2, left_ms);
    if (ready < 0 && errno != EINTR) throw SystemError(errno, "poll");
    if (ready > 0) return fds[1].revents == 0;
    if (left_s <= 0) return false;
  }
}

}  // namespace mk::rdma
