#include "transfer/rdma_channel.h"

#if MK_HAVE_VERBS
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "transfer/error.h"

namespace mk::transfer {
namespace {

constexpr double kProbeS = 2;  // for a peer to say which NICs it has
constexpr size_t kWindow = 4;  // works under way
constexpr uint64_t kMinSliceBytes = 64ull << 10;
constexpr uint64_t kMaxSliceBytes = 1ull << 20;
constexpr uint64_t kSlicesPerRail = 4;  // so that a slow rail's last slice is waited for less
constexpr int kMaxTries = 4;            // of a slice
// A NIC that is not near the memory is taken when the near ones are so much busier.
constexpr double kFarCost = 4;

uint64_t bit(size_t nic) { return uint64_t{1} << nic; }

}  // namespace

size_t RdmaChannel::window() const { return kWindow; }

void RdmaChannel::connect(const Limit& limit) {
  WireChannel::connect(limit);
  learn_nics(limit);
  make_rails();
  bring_up_some(limit);
  if (only_ && !is_any_up()) throw LinkDown(rails_.front().cause());
  keys_ = {};
}

Way RdmaChannel::way_to(const Range& range) const {
  if (!keys_.find(range)) {
    if (!only_) return WireChannel::way_to(range);
    return {"nics", "", "the memory is not registered with the peer's NICs"};
  }
  std::string rails;
  for (const Rail& rail : rails_) {
    const NicEntry& theirs = peer_nics_[rail.peer_nic()];
    const std::string name(theirs.name.data(), strnlen(theirs.name.data(), theirs.name.size()));
    rails += concat(rails.empty() ? "" : ", ", (*own_->nics)[rail.nic()].device->name(), " to ",
                    printable(name), rail.is_up() ? "" : concat(" (down: ", rail.cause(), ")"));
  }
  return {"nics", "", concat("slices go from NIC to NIC: ", rails)};
}

bool RdmaChannel::finds_nics(const Deadline& deadline, std::string& why_not) {
  const Interrupt nobody;
  try {
    WireChannel::connect({Deadline::after(std::min(deadline.left_s(), kProbeS)), nobody});
    learn_nics({deadline, nobody});
    make_rails();
  } catch (const Failure& failure) {
    why_not = failure.what();
  }
  const bool found = !rails_.empty();
  disconnect();
  return found;
}

void RdmaChannel::disconnect() noexcept {
  is_writing_ |= !doing_.empty();
  rails_.clear();  // the NICs let go of our memory
  ready_.clear();
  doing_.clear();
  WireChannel::disconnect();
}

std::vector<char> RdmaChannel::ask(Op op, const void* payload, size_t num_bytes, size_t entry_bytes,
                                   const Limit& limit) {
  const BatchHeader header{op, 0, ++num_questions_, 0, num_bytes};
  iovec parts[] = {{const_cast<BatchHeader*>(&header), sizeof(header)},
                   {const_cast<void*>(payload), num_bytes}};
  socket_.send(parts, num_bytes > 0 ? 2 : 1, limit);
  Ack ack;
  socket_.receive(&ack, sizeof(ack), limit);
  check_answer(ack, num_questions_, entry_bytes, kMaxKeysBytes);
  std::vector<char> answer(ack.status == Status::kDone ? ack.num_bytes : ack.refusal_bytes);
  socket_.receive(answer.data(), answer.size(), limit);
  if (ack.status == Status::kRefused) {
    throw Refused(printable(std::string(answer.begin(), answer.end())));
  }
  return answer;
}

void RdmaChannel::learn_nics(const Limit& limit) {
  const std::vector<char> answer = ask(Op::kNics, nullptr, 0, sizeof(NicEntry), limit);
  peer_nics_.resize(std::min(answer.size() / sizeof(NicEntry), kMaxNics));
  if (!peer_nics_.empty()) {
    std::memcpy(peer_nics_.data(), answer.data(), peer_nics_.size() * sizeof(NicEntry));
  }
}

void RdmaChannel::learn_keys(const Request& request, const Piece& piece, const Limit& limit) {
  std::vector<uint64_t> unknown;
  const RemoteRegion* known = nullptr;  // of the range before: mostly they are in the same one
  for_each_range(request, piece, [&](uint64_t, uint64_t address, uint64_t num_bytes) {
    const Range range{address, num_bytes};
    if (known && known->range.contains(range)) return;
    known = keys_.find(range);
    if (!known && unknown.size() < kMaxBatchRanges) unknown.push_back(address);
  });
  learn_keys(unknown, limit);
}

void RdmaChannel::learn_keys(const std::vector<uint64_t>& addresses, const Limit& limit) {
  if (addresses.empty()) return;
  const uint64_t num_bytes = addresses.size() * sizeof(uint64_t);
  keys_.add(parse_keys(ask(Op::kKeys, addresses.data(), num_bytes, 1, limit), peer_nics_.size()));
}

// As many as the side with more NICs has, so that each is used.
void RdmaChannel::make_rails() {
  const Nics& nics = *own_->nics;
  const size_t count = peer_nics_.empty() ? 0 : std::max(nics.size(), peer_nics_.size());
  for (size_t i = 0; i < count; ++i) {
    const Nic& nic = nics[i % nics.size()];
    Rail rail(nic, i % nics.size(), counters_->path(nic.device->name()));
    const auto meets = [&](const NicEntry& nic) { return nic.link_layer == rail.link_layer(); };
    if (std::any_of(peer_nics_.begin(), peer_nics_.end(), meets)) rails_.push_back(std::move(rail));
  }
  if (rails_.empty()) throw Failure("the peer has no NIC that can be connected with ours");
}

// Tries the peer's NIC of the same number first: machines of a kind have those on the same switch,
// or rail. Then, and after a failure, those behind it, in a circle.
void RdmaChannel::bring_up(size_t index, const Limit& limit) {
  Rail& rail = rails_[index];
  const size_t count = peer_nics_.size();
  const size_t first = rail.cause().empty() ? index % count : (rail.peer_nic() + 1) % count;
  for (size_t i = 0; i < count && !rail.is_up(); ++i) {
    const size_t peer_nic = (first + i) % count;
    if (peer_nics_[peer_nic].link_layer == rail.link_layer()) bring_up(index, peer_nic, limit);
  }
}

void RdmaChannel::bring_up(size_t index, size_t peer_nic, const Limit& limit) {
  Rail& rail = rails_[index];
  AttachRequest request{static_cast<uint32_t>(index), static_cast<uint32_t>(peer_nic), {}};
  std::string cause;
  try {
    request.initiator = entry_of(rail.open());
    const auto answer = ask(Op::kAttach, &request, sizeof(request), sizeof(QueuePairEntry), limit);
    QueuePairEntry entry{};
    if (answer.size() != sizeof(entry)) throw Failure("protocol error: no queue pair");
    std::memcpy(&entry, answer.data(), sizeof(entry));
    const double gb_per_s = static_cast<double>(peer_nics_[peer_nic].mb_per_s) / 1e3;
    return rail.connect(endpoint_of(entry), peer_nic, gb_per_s);
  } catch (const Refused& refused) {
    cause = refused.what();
  } catch (const Failure&) {  // of the connection
    throw;
  } catch (const std::exception& error) {
    cause = error.what();
  }
  rail.close();
  rail.pause(cause, peer_nic);
}

// Those whose pause is over; all if none is left and nothing else will do.
void RdmaChannel::bring_up_some(const Limit& limit) {
  const bool at_once = only_ && !is_any_up();
  for (size_t i = 0; i < rails_.size(); ++i) {
    if (!rails_[i].is_up() && (at_once || rails_[i].may_try())) bring_up(i, limit);
  }
}

bool RdmaChannel::is_any_up() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) { return rail.is_up(); });
}

void RdmaChannel::post(const Work& work, const Limit& limit, Interrupt&) {
  fence_lost(limit);
  Doing& doing = doing_.emplace_back(Doing{work});
  if (work.request->local.empty() || work.kind == Work::Kind::kNotify) return;
  Piece piece = work.piece;
  if (work.kind == Work::Kind::kCheck) Cutter(*work.request, max_piece_bytes()).next(piece);
  learn_keys(*work.request, piece, limit);
  if (work.kind == Work::Kind::kCheck) return;
  bring_up_some(limit);
  if (!is_any_up()) {
    if (only_) throw LinkDown(rails_.front().cause());
    return;
  }
  plan(doing);
  pump(limit);
}

void RdmaChannel::plan(Doing& doing) {
  const uint64_t share = doing.work.piece.num_bytes / (kSlicesPerRail * rails_.size());
  std::vector<Slice> slices;
  const Work& work = doing.work;
  if (!cut(*work.request, work.piece, keys_, std::clamp(share, kMinSliceBytes, kMaxSliceBytes),
           slices)) {
    return;
  }
  doing.by_nics = true;
  doing.num_slices = slices.size();
  for (Slice& slice : slices) {
    slice.work = first_doing_ + doing_.size() - 1;
    ready_.push_back(std::move(slice));
  }
}

Outcome RdmaChannel::finish(const Limit& limit) {
  while (doing_.front().num_slices > 0) {
    collect(limit);
    pump(limit);
    if (doing_.front().num_slices > 0) sleep(limit);
  }
  const Doing doing = std::move(doing_.front());
  doing_.pop_front();
  ++first_doing_;
  if (doing.by_nics && !doing.has_lost) return after_slices(doing, limit);
  const bool moves = doing.work.kind == Work::Kind::kMove && doing.work.piece.num_ranges > 0;
  return moves && only_ ? ask_why_not(doing, limit) : over_connection(doing.work, limit);
}

Outcome RdmaChannel::after_slices(const Doing& doing, const Limit& limit) {
  if (!doing.work.with_notify) return {doing.num_bytes, "", true};
  Work notify = doing.work;
  notify.kind = Work::Kind::kNotify;
  Outcome outcome = over_connection(notify, limit);
  outcome.num_bytes = doing.num_bytes;
  outcome.is_counted = true;
  return outcome;
}

// What NICs could not move: the peer says it best.
Outcome RdmaChannel::ask_why_not(const Doing& doing, const Limit& limit) {
  Work check = doing.work;
  check.kind = Work::Kind::kCheck;
  Outcome outcome = over_connection(check, limit);
  if (outcome.refusal.empty()) {
    outcome.refusal = "the memory is not registered with the NICs of both sides";
  }
  outcome.num_bytes = doing.num_bytes;
  outcome.is_counted = true;
  return outcome;
}

Outcome RdmaChannel::over_connection(const Work& work, const Limit& limit) {
  if (work.with_notify || work.kind == Work::Kind::kNotify) flush(limit);
  Interrupt nobody;
  WireChannel::post(work, limit, nobody);
  return WireChannel::finish(limit);
}

// Makes what was written visible at the peer, before it is told so. A rail that fails meanwhile is
// taken down at both ends, which does the same.
void RdmaChannel::flush(const Limit& limit) {
  std::vector<uint32_t> flushed;
  for (size_t i = 0; i < rails_.size(); ++i) {
    Rail& rail = rails_[i];
    if (!rail.is_up() || !rail.must_flush()) continue;
    try {
      rail.flush();
      flushed.push_back(static_cast<uint32_t>(i));
    } catch (const RailDown& down) {
      lose(rail, down, limit);
    }
  }
  const auto is_over = [&](uint32_t i) { return rails_[i].is_flushed(); };
  while (!std::all_of(flushed.begin(), flushed.end(), is_over)) {
    sleep(limit);
    collect(limit);
  }
  const auto is_gone = [&](uint32_t i) { return !rails_[i].is_up(); };
  flushed.erase(std::remove_if(flushed.begin(), flushed.end(), is_gone), flushed.end());
  if (flushed.empty()) return;
  ask(Op::kFlush, flushed.data(), flushed.size() * sizeof(uint32_t), 1, limit);
}

Rail* RdmaChannel::best_rail(const Slice& slice, const RemoteRegion& remote) {
  Rail* best = nullptr;
  double least = 0;
  for (Rail& rail : rails_) {
    if (!rail.is_up() || !remote.on_nics[rail.peer_nic()]) continue;
    const double here = slice.local->near & bit(rail.nic()) ? 1 : kFarCost;
    const double there = remote.near & bit(rail.peer_nic()) ? 1 : kFarCost;
    const double cost = rail.seconds_for(slice.num_bytes) * here * there;
    if (!best || cost < least) {
      best = &rail;
      least = cost;
    }
  }
  return best;
}

// Gives slices to rails, as far as there is room.
void RdmaChannel::pump(const Limit& limit) {
  bring_up_some(limit);
  while (!ready_.empty()) {
    Slice& slice = ready_.front();
    const RemoteRegion* const remote = keys_.find(slice);
    Rail* const rail = remote ? best_rail(slice, *remote) : nullptr;
    if (!rail) {
      if (only_ && !is_any_up()) throw LinkDown(rails_.front().cause());
      Doing& doing = doing_of(slice);
      doing.has_lost = true;
      --doing.num_slices;
      ready_.pop_front();
      continue;
    }
    if (!rail->has_room()) return;  // worth the wait
    const auto on_nic = remote->on_nics[rail->peer_nic()];
    Slice taken = std::move(slice);
    ready_.pop_front();
    try {
      rail->submit(std::move(taken), on_nic);
    } catch (const RailDown& down) {
      lose(*rail, down, limit);
    }
  }
}

void RdmaChannel::collect(const Limit& limit) {
  for (Rail& rail : rails_) {
    if (!rail.is_up()) continue;
    std::vector<Slice> done;
    try {
      rail.collect(done);
      settle(done);
    } catch (const RailDown& down) {
      settle(done);
      lose(rail, down, limit);
    }
  }
}

void RdmaChannel::settle(std::vector<Slice>& done) {
  for (const Slice& slice : done) {
    Doing& doing = doing_of(slice);
    --doing.num_slices;
    doing.num_bytes += slice.num_bytes;
  }
}

void RdmaChannel::lose(Rail& rail, const RailDown& down, const Limit& limit) {
  const DetachRequest request{static_cast<uint32_t>(&rail - rails_.data()), 0};
  std::vector<Slice> left = rail.close();
  rail.pause(down.what(), rail.peer_nic());
  ask(Op::kDetach, &request, sizeof(request), 1, limit);
  for (Slice& slice : left) {
    if (++slice.num_tries == kMaxTries && only_) throw LinkDown(down.what());
    ready_.push_front(std::move(slice));
  }
  if (!down.is_refused) return;
  std::vector<uint64_t> addresses;
  for (const Slice& slice : ready_) addresses.push_back(slice.segments.front().remote);
  addresses.resize(std::min<size_t>(addresses.size(), kMaxBatchRanges));
  keys_ = {};
  learn_keys(addresses, limit);
}

// Until a rail has something, or the connection ends.
void RdmaChannel::sleep(const Limit& limit) {
  std::vector<pollfd> fds{{limit.interrupt.fd(), POLLIN, 0}, {socket_.fd(), POLLIN, 0}};
  for (Rail& rail : rails_) {
    if (!rail.is_up()) continue;
    try {
      if (rail.arm()) return;
    } catch (const std::exception& error) {
      return lose(rail, RailDown(error.what(), false), limit);
    }
    for (const int fd : rail.queue().fds()) fds.push_back({fd, POLLIN, 0});
  }
  if (poll(fds.data(), fds.size(), limit.deadline.poll_ms()) < 0 && errno != EINTR) {
    throw SystemError(errno, "poll");
  }
  limit.check();
  if (fds[1].revents && !socket_.at_rest()) throw LinkDown("connection closed by peer");
}

}  // namespace mk::transfer
#endif
