#include "transfer/local_channel.h"

#include <algorithm>
#include <cstring>

#include "transfer/error.h"
#include "transfer/wire.h"

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

void LocalChannel::connect(const Limit&) { find_peer(); }

std::vector<RegionTable::Listed> LocalChannel::list_regions(const Limit&) {
  return find_peer()->regions.list(kMaxListed);
}

std::optional<Outcome> LocalChannel::run(const Work& work, const Limit& limit,
                                         Interrupt& interrupt) {
  Outcome outcome;
  try {
    carry_out(work, limit, interrupt, outcome);
  } catch (const Refused& refused) {
    outcome.refusal = refused.what();
  }
  return outcome;
}

void LocalChannel::carry_out(const Work& work, const Limit& limit, Interrupt& interrupt,
                             Outcome& outcome) const {
  const auto peer = find_peer();
  const Request& request = *work.request;
  const bool writes = request.writes();
  const auto check = [&](size_t first, size_t count) {
    const Rights needed = writes ? kRemoteWrite : kRemoteRead;
    const Ranges ranges = request.ranges(request.remote).part(first, count);
    return peer->regions.check(ranges, needed, "remote", first);
  };
  limit.check();
  if (work.kind == Work::Kind::kCheck) {
    check(0, request.num_ranges());
  } else if (work.piece.num_ranges > 0) {
    const auto regions = check(work.piece.first_range, work.piece.num_ranges);
    const Pin pin = peer->regions.pin(regions, interrupt);
    Copier copier(limit);
    for_each_range(request, work.piece, [&](uint64_t local, uint64_t remote, uint64_t num_bytes) {
      copier.copy(writes ? remote : local, writes ? local : remote, num_bytes);
      outcome.num_bytes += num_bytes;
    });
  }
  if (work.with_notify || work.kind == Work::Kind::kNotify) {
    peer->notifications.push(own_name_, *request.notify);
  }
}

}  // namespace mk::transfer
