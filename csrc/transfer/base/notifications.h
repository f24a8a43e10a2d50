// NotificationQueue: short messages from peers, waiting to be received.
//
// Layer: transfer. Bounded: a peer that sends faster than the owner receives is refused.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "transfer/base/limit.h"

namespace mk::transfer {

struct Notification {
  std::string peer;
  std::string bytes;
};

class NotificationQueue {
 public:
  void push(const std::string& peer, std::string bytes);  // throws Refused, also when full

  // All there are; waits for at least one until the deadline. Throws InvalidArgument once closed,
  // even during the wait.
  std::vector<Notification> take(const Deadline& deadline);

  // All there are; later ones are refused until accept(). Throws InvalidArgument once closed.
  std::vector<Notification> refuse();
  void accept();

  void close();

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Notification> queue_;
  uint64_t num_bytes_ = 0;
  bool refuses_ = false;
  bool closed_ = false;
};

}  // namespace mk::transfer
