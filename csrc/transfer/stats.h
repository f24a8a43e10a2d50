// Stats: what an engine has asked of its peers, and what came of it.
//
// Layer: transfer. Counted where the request was made, when it ends.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "transfer/channel.h"

namespace mk::transfer {

struct Counters {
  uint64_t num_bytes_read = 0;  // confirmed bytes, also those of requests that failed later
  uint64_t num_bytes_written = 0;
  uint64_t num_requests = 0;
  uint64_t num_errors = 0;  // requests that failed, were cancelled or ran out of time
};

class Stats {
 public:
  using Table = std::map<std::pair<std::string, Transport>, Counters>;  // by peer and transport

  void record(const std::string& peer, Transport transport, Direction direction, uint64_t num_bytes,
              bool failed) {
    const std::lock_guard lock(mutex_);
    Counters& counters = table_[{peer, transport}];
    (direction == Direction::kRead ? counters.num_bytes_read : counters.num_bytes_written) +=
        num_bytes;
    counters.num_requests += 1;
    counters.num_errors += failed;
  }

  Table table() const {
    const std::lock_guard lock(mutex_);
    return table_;
  }

 private:
  mutable std::mutex mutex_;
  Table table_;
};

}  // namespace mk::transfer
