#include "transfer/peer/peer.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "common/thread.h"
#include "transfer/base/error.h"
#include "transfer/channel/caller_driven.h"
#include "transfer/memory/gpu_ranges.h"

namespace mk::transfer {
namespace {

// Below this, one connection is as fast as two, and a second one would have to be woken up.
constexpr uint64_t kSplitBytes = 2ull << 20;
constexpr uint64_t kSplitMappedBytes = 8ull << 20;  // it may all be in the cache
constexpr uint64_t kMinPieceBytes = 1ull << 20;
constexpr uint64_t kPiecesPerLane = 4;  // shortens the wait for a slow lane's last piece
constexpr uint64_t kPageBytes = 4096;   // a cut within one would keep a disk from moving it whole

constexpr uint64_t kMaxRunInCallerBytes = 256ull << 10;   // takes less time than waking a thread
constexpr uint64_t kMaxMapInCallerBytes = 1ull << 20;     // likewise, if it is mapped
constexpr uint64_t kMaxHelpBytes = 8ull << 20;            // a millisecond: wait() returns that late
constexpr uint64_t kMaxSendInCallerBytes = 512ull << 10;  // sent sooner than two threads are woken
constexpr uint64_t kMaxReadInCallerBytes = 128ull << 10;  // a lane receives while more arrives
constexpr size_t kMaxInCallerRanges = 256;

// After it an express lane disconnects: it is of no use, and takes a place in the pool.
constexpr std::chrono::seconds kExpressLaneIdle{10};

// Who carries a request out: its caller, as far as that takes less time than to wake another
// thread, or lanes. What its caller cannot do at that moment goes to the lanes.
struct Dispatch {
  bool runs = false;    // the caller runs it at once: then there is no ticket
  bool drives = false;  // the caller begins it, and finishes it if it waits
  bool helps = false;   // lanes take it from the queue, and so may the caller while it waits
  bool defers = false;  // likewise, and no lane is woken for it in the first moment
};

bool is_small_enough_to_drive(const Request& request) {
  const uint64_t num_notify_bytes = request.notify ? request.notify->size() : 0;
  const uint64_t most = request.writes() ? kMaxSendInCallerBytes : kMaxReadInCallerBytes;
  return request.num_bytes + num_notify_bytes <= most && request.num_ranges() <= kMaxInCallerRanges;
}

// Parts of it only copy, and little enough to remain interruptible.
bool may_help(const Request& request, uint64_t max_piece_bytes) {
  return !request.after && !request.verify &&
         std::min(request.num_bytes, max_piece_bytes) <= kMaxHelpBytes &&
         GpuRanges(request.regions).empty();
}

// From here on several lanes share a request.
uint64_t split_bytes(Channel& channel) {
  const RunsInCaller* const runs = channel.runs_in_caller();
  return runs && runs->maps_memory() ? kSplitMappedBytes : kSplitBytes;
}

Dispatch choose_dispatch(Channel& channel, const Request& request, uint64_t max_piece_bytes) {
  Dispatch dispatch;
  if (const RunsInCaller* const runs = channel.runs_in_caller()) {
    const uint64_t most = runs->maps_memory() ? kMaxMapInCallerBytes : kMaxRunInCallerBytes;
    dispatch.runs = request.num_bytes <= most && !request.after;
    dispatch.helps = may_help(request, max_piece_bytes);
    // Unless another waits for it, a notification's receiver.
    dispatch.defers =
        dispatch.helps && !request.notify && request.num_bytes <= split_bytes(channel);
  } else if (const CallerDriven* const driven = channel.caller_driven()) {
    dispatch.drives = is_small_enough_to_drive(request) && driven->may_drive(request);
  }
  return dispatch;
}

}  // namespace

Peer::Peer(std::string name, Route route, std::shared_ptr<Endpoint> own,
           std::shared_ptr<ConnectionPool> pool, Stats& stats)
    : name_(std::move(name)),
      transport_(route.channels.front()->transport()),
      reasons_(std::move(route.reasons)),
      own_(std::move(own)),
      pool_(std::move(pool)),
      counters_(stats.enter(name_, transport_)),
      queue_(name_),
      fence_([this] { queue_.wake_all(); }),
      express_lanes_(name_, fence_, *pool_,
                     [this](JobQueue& queue, const Lanes& alone, size_t number) {
                       return make_express_lane(queue, alone, number);
                     }),
      rpc_client_(std::make_shared<RpcClient>(
          name_, [this] { return lanes_.front()->channel().for_rpc(); }, pool_, counters_)) {
  threads_.reserve(route.channels.size());
  for (auto& channel : route.channels) {
    const size_t number = lanes_.size();
    paths_.push_back(channel->path(number));
    PathCounters& counters = counters_->path(paths_.back());
    channel->count_in(*counters_);
    lanes_.push_back(std::make_unique<Lane>(std::move(channel), queue_, own_->regions, *pool_,
                                            lanes_, counters));
  }
}

void Peer::start(const Deadline& deadline) {
  const std::lock_guard lock(threads_mutex_);
  if (closed_) throw TransferError(name_, {"the peer was closed", FailureKind::kClosed});
  try {
    threads_.push_back(start_thread([this, deadline] { lead(deadline); }));
  } catch (const SystemError& error) {
    throw TransferError(name_, reason_of(error));
  }
}

// If no threads can be started, the running lanes carry on without the others, which are started as
// soon as a later request succeeds in it.
void Peer::start_others() try {
  const std::lock_guard lock(threads_mutex_);
  while (!closed_ && threads_.size() < lanes_.size()) {
    threads_.push_back(start_thread([lane = lanes_[threads_.size()].get()] { lane->run(); }));
  }
} catch (const std::exception&) {
}

void Peer::lead(const Deadline& deadline) {
  if (connect(deadline)) lanes_.front()->run();
}

bool Peer::connect(const Deadline& deadline) {
  Lane& lane = *lanes_.front();
  ErrorReason reason;
  try {
    lane.connect({deadline, lane.interrupt()});
  } catch (const std::exception& error) {
    reason = reason_of(error);
    lane.count_failure(error);
  }
  const std::lock_guard lock(mutex_);
  connected_ = reason;
  changed_.notify_all();
  return reason.empty();
}

bool Peer::wait_connected(const Deadline& until) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, until.at(), [this] { return connected_.has_value(); })) {
    return false;
  }
  if (!connected_->empty()) throw TransferError(name_, *connected_);
  return true;
}

TicketRef Peer::submit(Request request, const Deadline& deadline) {
  Counted counted(counters_, request.direction, request.num_bytes);
  const uint64_t max_bytes = max_piece_bytes(request);
  const Dispatch dispatch = choose_dispatch(lanes_.front()->channel(), request, max_bytes);
  std::vector<Range> confirmed;
  std::optional<Outcome> outcome;
  if (dispatch.runs) outcome = run_in_caller(request, deadline, confirmed);
  if (outcome && outcome->refusal.empty()) {
    counted.end(outcome->num_bytes, /*failed=*/false);
    return nullptr;
  }
  auto ticket = std::make_shared<Ticket>(weak_from_this(), name_, std::move(request), deadline,
                                         std::move(counted));
  if (outcome) {
    ticket->finish(outcome->refusal, outcome->num_bytes, confirmed);
    return ticket;
  }
  // Requests of one thread are begun in order, and a notification comes after those of all.
  const bool is_late = !fence_.idle() && (ticket->request().notify || express_lanes_.has_mine());
  if (dispatch.drives && !is_late && begin_in_caller(ticket, max_bytes)) return ticket;
  if (dispatch.helps) ticket->leave_to_caller();
  if (queue_.push(ticket, max_bytes, dispatch.defers, is_late ? &fence_ : nullptr)) start_others();
  return ticket;
}

// In the caller's thread. False: it must be queued.
bool Peer::begin_in_caller(const TicketRef& ticket, uint64_t max_piece_bytes) {
  if (lanes_.front()->begin_in_caller(ticket, max_piece_bytes)) return true;
  return lanes_.size() > 1 && !ticket->request().notify && queue_.has_only_others() &&
         express_lanes_.begin(ticket, max_piece_bytes);
}

std::unique_ptr<Lane> Peer::make_express_lane(JobQueue& queue, const Lanes& alone, size_t number) {
  auto channel = another_channel();
  PathCounters& counters = counters_->path(channel->path(lanes_.size() + number));
  return std::make_unique<Lane>(std::move(channel), queue, own_->regions, *pool_, alone, counters,
                                kExpressLaneIdle);
}

// Carries it out in the caller's thread. Empty: it was not, and must be queued.
std::optional<Outcome> Peer::run_in_caller(Request& request, const Deadline& deadline,
                                           std::vector<Range>& confirmed) {
  const CallerInterrupts::Hold here(caller_interrupts_);
  if (!here || !(queue_.idle() || (!request.notify && queue_.has_only_others()))) return {};
  bool notify_begun = false;
  Work work{Work::Kind::kMove, &request, 0, {}, request.notify.has_value(), &notify_begun};
  Cutter cutter(request, lanes_.front()->channel().max_piece_bytes());
  cutter.next(work.piece);
  if (!cutter.at_end()) return {};
  try {
    const std::optional<Outcome> outcome = run(work, {deadline, *here});
    const bool refused = outcome && !outcome->refusal.empty();
    if (refused && outcome->num_bytes == 0 && split(request)) return {};  // see coalesce.h
    if (refused && work.has_arrived(outcome->num_bytes, /*failed=*/true)) {
      confirmed.push_back({0, outcome->num_bytes});
    }
    return outcome;
  } catch (const std::exception& error) {
    return Outcome{0, reason_of(error)};
  }
}

// Runs in the caller's thread. Empty: the work must be posted.
std::optional<Outcome> Peer::run(const Work& work, const Limit& limit) {
  Lane& lane = *lanes_.front();
  const Pin pin = own_->regions.pin(work.request->regions, limit.interrupt);
  const std::optional<Outcome> outcome = lane.channel().runs_in_caller()->run(work, limit);
  if (outcome) {
    lane.visited.store(true, std::memory_order_relaxed);
    lane.count(work, *outcome);
  }
  return outcome;
}

bool Peer::drive(const Ticket& ticket, const Deadline& until, bool polls) {
  if (ticket.express_lane()) return express_lanes_.drive(ticket, until, polls);
  if (!runs_in_caller()) return lanes_.front()->drive(ticket, until, polls);
  help(ticket, until);
  return false;
}

void Peer::help(const Ticket& ticket, const Deadline& until) {
  const CallerInterrupts::Hold here(caller_interrupts_);
  const bool is_late = until.passed() || ticket.deadline().passed();
  if (!here || is_late) return queue_.wake_lead();
  const bool pieces = lanes_.size() > 1;  // a single lane may have to carry them in their order
  Task task;
  // Until lanes have the rest of it, or will take it.
  while (!until.passed() && queue_.take_own(ticket, pieces, *here, task)) {
    std::optional<Outcome> outcome;
    ErrorReason reason;
    try {
      outcome = run(task.work, {ticket.deadline(), *here});
    } catch (const std::exception& error) {
      reason = reason_of(error);
    }
    if (!outcome) {
      queue_.fail(task, *here, reason, reason.empty() ? Retry::kFree : Retry::kNo);
      return;
    }
    queue_.finish(task, *here, *outcome);
  }
}

uint64_t Peer::max_piece_bytes(const Request& request) const {
  Channel& channel = lanes_.front()->channel();
  const uint64_t most = channel.max_piece_bytes();
  if (lanes_.size() == 1 || request.num_bytes <= split_bytes(channel)) return most;
  const uint64_t share = request.num_bytes / (kPiecesPerLane * lanes_.size());
  return std::clamp(share / kPageBytes * kPageBytes, kMinPieceBytes, most);
}

void Peer::interrupt(const ErrorReason& reason) {
  queue_.close(reason);
  for (const auto& lane : lanes_) lane->interrupt().signal(reason);  // one may be connecting
  express_lanes_.interrupt(reason);
  rpc_client_->interrupt(reason);
}

void Peer::close(const ErrorReason& reason) {
  interrupt(reason);
  const std::lock_guard lock(threads_mutex_);
  closed_ = true;
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  for (const auto& lane : lanes_) lane->close();
  express_lanes_.close(reason);
  rpc_client_->close();
}

}  // namespace mk::transfer
