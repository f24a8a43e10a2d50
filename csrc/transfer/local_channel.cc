#include "transfer/local_channel.h"

#include <algorithm>
#include <cstring>

#include "transfer/error.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kStepBytes = 4ull << 20;  // copied between two looks at the limit

// memmove in steps. Towards higher addresses inside itself, the source must be read from its end.
class Copier {
 public:
  explicit Copier(const Limit& limit) : limit_(limit) {}

  void copy(uint64_t dst, uint64_t src, uint64_t num_bytes) {
    const bool backwards = dst > src && dst - src < num_bytes;
    for (uint64_t done = 0; done < num_bytes;) {
      const uint64_t step = std::min(num_bytes - done, kStepBytes - since_check_);
      const uint64_t offset = backwards ? num_bytes - done - step : done;
      std::memmove(reinterpret_cast<void*>(dst + offset),
                   reinterpret_cast<const void*>(src + offset), step);
      done += step;
      since_check_ += step;
      if (since_check_ == kStepBytes) {
        limit_.check();
        since_check_ = 0;
      }
    }
  }

 private:
  const Limit& limit_;
  uint64_t since_check_ = 0;
};

}  // namespace

std::shared_ptr<Endpoint> LocalChannel::find_peer() const {
  auto peer = find_in_process(peer_address_);
  if (!peer || peer->instance != peer_instance_) throw Failure("the peer's engine was closed");
  return peer;
}

void LocalChannel::connect(Interrupt&, const Deadline&) { find_peer(); }

void LocalChannel::run(const Request& request, Interrupt& interrupt, const Deadline& deadline,
                       uint64_t& num_bytes_done) {
  const auto peer = find_peer();
  const bool writes = request.direction == Direction::kWrite;
  const Limit limit{deadline, interrupt};
  limit.check();
  {
    const Rights needed = writes ? kRemoteWrite : kRemoteRead;
    const Pin pin = peer->regions.pin(
        peer->regions.check(request.remote.data(), request.remote.size(), needed, "remote", 0),
        interrupt);
    Copier copier(limit);
    for (size_t i = 0; i < request.local.size(); ++i) {
      const Range& local = request.local[i];
      const uint64_t remote = request.remote[i].address;
      copier.copy(writes ? remote : local.address, writes ? local.address : remote,
                  local.num_bytes);
      num_bytes_done += local.num_bytes;
    }
  }
  if (request.notify) peer->notifications.push(own_name_, *request.notify);
}

}  // namespace mk::transfer
