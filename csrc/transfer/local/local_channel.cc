#include "transfer/local/local_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/copy_bytes.h"
#include "common/fault_guard.h"
#include "transfer/base/error.h"
#include "transfer/channel/checksum.h"
#include "transfer/channel/rpc_channel.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kStepBytes = 4ull << 20;  // copied between checks of the limit

// memmove in steps. If the target overlaps the source at a higher address, it copies from the end.
// Counts what it has copied.
class Copier {
 public:
  Copier(const Limit& limit, bool writes, uint64_t& num_bytes_done)
      : limit_(limit), writes_(writes), num_bytes_done_(num_bytes_done) {}

  void copy(uint64_t dst, uint64_t src, uint64_t num_bytes) {
    const bool backwards = dst > src && dst - src < num_bytes;
    const bool overlap = backwards || (src > dst && src - dst < num_bytes);
    for (uint64_t done = 0; done < num_bytes;) {
      const uint64_t step = std::min(num_bytes - done, kStepBytes - num_pending_bytes_);
      const uint64_t offset = backwards ? num_bytes - done - step : done;
      pending_[num_pending_++] = {dst + offset, src + offset, step, overlap};
      done += step;
      num_pending_bytes_ += step;
      if (num_pending_bytes_ == kStepBytes) {
        flush();
        limit_.check();
      }
      if (num_pending_ == kMaxPending) flush();
    }
  }

  void flush() {
    const auto fault = guarded([this]() noexcept {
      for (size_t i = 0; i < num_pending_; ++i) {
        const Step& step = pending_[i];
        auto* const to = reinterpret_cast<void*>(step.dst);
        const auto* const from = reinterpret_cast<const void*>(step.src);
        step.overlap ? std::memmove(to, from, step.num_bytes)
                     : (copy_bytes(to, from, step.num_bytes), to);
      }
    });
    if (fault) throw Inaccessible(side_of(*fault), fault->describe());
    num_bytes_done_ += std::exchange(num_pending_bytes_, 0);
    num_pending_ = 0;
  }

 private:
  struct Step {
    uint64_t dst, src, num_bytes;
    bool overlap;
  };
  static constexpr size_t kMaxPending = 64;

  const char* side_of(const Fault& fault) const {
    for (size_t i = 0; i < num_pending_; ++i) {
      const Range dst{pending_[i].dst, pending_[i].num_bytes};
      const Range src{pending_[i].src, pending_[i].num_bytes};
      if (dst.contains({fault.address, 1})) return writes_ ? "the peer's " : "local ";
      if (src.contains({fault.address, 1})) return writes_ ? "local " : "the peer's ";
    }
    return "";
  }

  const Limit& limit_;
  const bool writes_;
  uint64_t& num_bytes_done_;
  Step pending_[kMaxPending];
  size_t num_pending_ = 0;
  uint64_t num_pending_bytes_ = 0;
};

// Copies what is on the host at both ends; the rest is left to GPUs.
void append_gpu_copies(std::vector<GpuCopy>& copies, uint64_t dst, const GpuRanges& dst_gpus,
                       uint64_t src, const GpuRanges& src_gpus, uint64_t num_bytes,
                       Copier& copier) {
  while (num_bytes > 0) {
    const GpuRanges::Stretch from = src_gpus.at(src, num_bytes);
    const auto [to, step] = dst_gpus.at(dst, from.num_bytes);
    if (from.device >= 0) {
      copies.push_back({dst, src, step, from.device, to >= 0 ? to : kAnyHost});
    } else if (to >= 0) {
      copies.push_back({dst, src, step, to, kAnyHost});
    } else {
      copier.copy(dst, src, step);
    }
    dst += step;
    src += step;
    num_bytes -= step;
  }
}

// Closed by the peer, it is not a region of its any more.
Pin pinned(Endpoint& peer, const std::vector<RegionRef>& regions, Interrupt& interrupt) try {
  return peer.regions.pin(regions, interrupt);
} catch (const Refused& refused) {
  throw Refused(ErrorReason(refused.what(), kind_of_peer(refused.kind)));
}

// Copies between two checksums; the first is of the sources, before the copy, as they may overlap.
template <class Copy>
void verified(const Request& request, const Piece& piece, const GpuRanges& here,
              const GpuRanges& there, const Limit& limit, const Copy& copy) {
  Staging staging;
  Checksummer local(here, staging, limit), remote(there, staging, limit);
  const auto sum = [&](bool of_local, uint64_t local_at, uint64_t remote_at, uint64_t num_bytes) {
    return of_local ? local.sum({local_at, num_bytes}) : remote.sum({remote_at, num_bytes});
  };
  std::vector<uint64_t> expected;
  for_each_range(request, piece, [&](uint64_t local_at, uint64_t remote_at, uint64_t num_bytes) {
    expected.push_back(sum(request.writes(), local_at, remote_at, num_bytes));
  });
  copy();
  size_t i = 0;
  for_each_range(request, piece, [&](uint64_t local_at, uint64_t remote_at, uint64_t num_bytes) {
    if (sum(!request.writes(), local_at, remote_at, num_bytes) != expected[i++]) {
      throw Refused(checksum_reason(remote_at, local_at, num_bytes));
    }
  });
}

}  // namespace

std::shared_ptr<Endpoint> LocalChannel::find_peer() const {
  auto peer = peer_.lock();
  if (!peer || peer->has_left || peer->owner.forked())
    throw Failure("the peer's engine was closed", FailureKind::kGone);
  return peer;
}

void LocalChannel::connect(const Limit&) { find_peer(); }

std::unique_ptr<RpcChannel> LocalChannel::for_rpc() const {
  find_peer();  // that it is closed says more than that it has none
  return nullptr;
}

std::vector<RegionTable::Listed> LocalChannel::list_regions(const Limit&) {
  return find_peer()->regions.list(kMaxListed);
}

void LocalChannel::post(const Work& work, const Limit& limit) {
  outcome_ = {};
  try {
    carry_out(work, limit, &queue_, outcome_);
  } catch (const Refused& refused) {
    outcome_.refusal = refused.reason();
  } catch (const GpuFailure& failure) {
    outcome_.refusal = failure.reason();
  } catch (const Inaccessible& fault) {
    outcome_.refusal = fault.reason();
  }
}

std::optional<Outcome> LocalChannel::run(const Work& work, const Limit& limit) {
  Outcome outcome;
  try {
    if (!carry_out(work, limit, nullptr, outcome)) return std::nullopt;
  } catch (const Refused& refused) {
    outcome.refusal = refused.reason();
  } catch (const Inaccessible& fault) {
    outcome.refusal = fault.reason();
  }
  return outcome;
}

bool LocalChannel::carry_out(const Work& work, const Limit& limit, GpuQueue* queue,
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
    const Pin pin = pinned(*peer, regions, limit.interrupt);
    const GpuRanges here(request.regions), there(regions);
    const bool on_gpu = !here.empty() || !there.empty();
    if (on_gpu && !queue) return false;
    Copier copier(limit, writes, outcome.num_bytes);
    std::vector<GpuCopy> copies;
    const auto copy = [&] {
      for_each_range(request, work.piece, [&](uint64_t local, uint64_t remote, uint64_t num_bytes) {
        const uint64_t dst = writes ? remote : local, src = writes ? local : remote;
        if (on_gpu) {
          append_gpu_copies(copies, dst, writes ? there : here, src, writes ? here : there,
                            num_bytes, copier);
        } else {
          copier.copy(dst, src, num_bytes);
        }
      });
      copier.flush();
      if (!copies.empty()) queue->copy(copies, limit, outcome.num_bytes);
    };
    request.verify ? verified(request, work.piece, here, there, limit, copy) : copy();
  }
  if (work.with_notify || work.kind == Work::Kind::kNotify) {
    *work.notify_begun = true;
    peer->notifications.push(own_name_, *request.notify);
  }
  return true;
}

}  // namespace mk::transfer
