#include "transfer/engine/stream_transfers.h"

#include <exception>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/gpu/host_function.h"
#include "transfer/memory/gpu_ranges.h"

namespace mk::transfer {
namespace {

void carry_out(Peer& peer, Request request, double deadline_s) {
  const TicketRef ticket = peer.submit(std::move(request), Deadline::after(deadline_s));
  if (!ticket) return;
  while (!ticket->wait(Deadline::never())) {
  }
  ticket->check();
}

}  // namespace

void StreamTransfers::enqueue(uint64_t stream, PeerRef peer, Request request, double deadline_s,
                              uint64_t key) {
  check();
  const char* const op = request.op;
  engine_->prepare(*peer, request);
  if (!engine_->uses_only_nics(*peer) && !GpuRanges(request.regions).empty()) {
    throw Unavailable(concat(op, ": local memory must be of the host, for ", peer->name(),
                             " is not reached by NICs alone, got memory of a GPU"));
  }
  std::vector<RegionRef> regions = request.regions;
  std::list<Item> one;
  one.push_back({shared_from_this(), std::move(peer), std::move(request), deadline_s, key,
                 std::move(regions)});
  Item& item = one.front();
  item.place = one.begin();
  {
    const std::lock_guard lock(mutex_);
    item.num_told = num_told_;
    enqueued_.splice(enqueued_.end(), one);
  }
  try {
    call_in_stream(stream, &StreamTransfers::arrive, &item);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    one.splice(one.end(), enqueued_, item.place);
    throw;
  }
}

// In a thread of the driver's, which must not destroy anything that may call the driver.
void StreamTransfers::arrive(void* data) noexcept {
  Item& item = *static_cast<Item*>(data);
  std::optional<TransferError> failure;
  const std::string& peer = item.peer->name();
  try {
    if (item.owner->may_begin(item)) {
      carry_out(*item.peer, std::move(item.request), item.deadline_s);
    } else {
      item.failure = "not begun, because an earlier transfer in a stream had failed";
    }
  } catch (const TransferError& error) {
    failure = error;
  } catch (const std::exception& error) {
    failure.emplace(peer, reason_of(error));
  }
  item.owner->end(item, std::move(failure));
}

bool StreamTransfers::may_begin(const Item& item) {
  const std::lock_guard lock(mutex_);
  return !failure_ && item.num_told == num_told_;
}

void StreamTransfers::end(Item& item, std::optional<TransferError> failure) noexcept {
  if (failure) item.failure = failure->what();
  const std::lock_guard lock(mutex_);
  if (failure && !failure_) failure_ = std::move(failure);
  ended_.splice(ended_.end(), enqueued_, item.place);
  changed_.notify_all();
}

std::vector<std::pair<uint64_t, std::string>> StreamTransfers::take(const Deadline& until) {
  std::list<Item> taken;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, until.at(), [this] { return !ended_.empty(); });
    taken.swap(ended_);
  }
  std::vector<std::pair<uint64_t, std::string>> result;
  for (Item& item : taken) result.emplace_back(item.key, std::move(item.failure));
  return result;
}

void StreamTransfers::check() {
  const std::lock_guard lock(mutex_);
  if (!failure_) return;
  ++num_told_;
  TransferError failure = *std::exchange(failure_, std::nullopt);
  failure.reason.text = concat("a transfer in a stream failed: ", failure.reason.text);
  throw failure;
}

}  // namespace mk::transfer
