#include "transfer/rdma/rdma_channel.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/memory/nic_gpus.h"
#include "transfer/net/stream.h"

namespace mk::transfer {
namespace {

constexpr double kProbeS = 2;  // for a peer to list its NICs
constexpr double kPortsS = 3;  // for a port to be active, at each of a work's retries
constexpr int kLookAtPortsMs = 50;
constexpr size_t kWindow = 4;  // works in flight
constexpr uint64_t kMinSliceBytes = 64ull << 10;
constexpr uint64_t kMaxSliceBytes = 1ull << 20;
constexpr uint64_t kSlicesPerRail = 4;  // shortens the wait for a slow rail's last slice
constexpr int kMaxTries = 4;            // of a slice, if no other rail can move it
constexpr int kMostTries = 16;          // of a slice, by whatever rails
constexpr char kNotOnNics[] = "the memory is not registered with the NICs of both sides";
}  // namespace

size_t RdmaChannel::window() const { return kWindow; }

void RdmaChannel::connect(const Limit& limit) {
  TcpChannel::connect(limit);
  rails_.meet(queries_.nics(limit), *counters_);
  if (only_) await_ports(limit);
  bring_up(limit);
  if (only_ && !rails_.is_any_up())
    throw LinkDown(ErrorReason(rails_.reason(), FailureKind::kDevice));
  keys_ = {};
}

// A port that goes down for a moment must not use up a request's retries.
void RdmaChannel::await_ports(const Limit& limit) {
  const Deadline patience = Deadline::after(kPortsS);
  while (!rails_.has_active_ports() && !patience.passed()) {
    pollfd interrupt{limit.interrupt.fd(), POLLIN, 0};
    poll(&interrupt, 1, kLookAtPortsMs);
    limit.check();
    rails_.learn_ports(queries_.nics(limit));
  }
}

Path RdmaChannel::path_to(const Range& range, int device) const {
  if (!keys_.find(range)) {
    if (!only_) return TcpChannel::path_to(range, device);
    return {"nics", "", "the memory is not registered with the peer's NICs"};
  }
  if (!rails_.is_any_up()) {
    Path path = TcpChannel::path_to(range, device);
    path.why = concat("no NIC can be connected: ", rails_.describe());
    return path;
  }
  return {"nics", "", concat("slices go from NIC to NIC: ", rails_.describe()), rails_.nics_up()};
}

void RdmaChannel::bring_up(const Limit& limit) {
  if (rails_.bring_up(queries_, only_, limit)) tell_trouble();
}

void RdmaChannel::tell_trouble() {
  std::string trouble = rails_.trouble();
  const std::lock_guard lock(trouble_mutex_);
  trouble_ = std::move(trouble);
}

std::string RdmaChannel::trouble() const {
  const std::lock_guard lock(trouble_mutex_);
  return trouble_;
}

bool RdmaChannel::finds_nics(const Deadline& deadline, std::string& why_not) {
  Interrupt unused;
  const Limit limit{Deadline::after(std::min(deadline.left_s(), kProbeS)), unused};
  try {
    TcpChannel::connect(limit);
    rails_.meet(queries_.nics(limit), *counters_);
  } catch (const Failure& failure) {
    why_not = failure.what();
  }
  const bool found = rails_.size() > 0;
  disconnect();
  return found;
}

void RdmaChannel::disconnect() noexcept {
  is_writing_ |= !doing_.empty();
  rails_.clear();  // the NICs release our memory
  tell_trouble();
  ready_.clear();
  doing_.clear();
  TcpChannel::disconnect();
}

void RdmaChannel::learn_keys(const Request& request, const Piece& piece, const Limit& limit) {
  std::vector<uint64_t> unknown;
  const RemoteRegion* known = nullptr;  // of the previous range: usually the same
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
  keys_.add(queries_.keys(addresses, rails_.num_peer_nics(), limit));
}

void RdmaChannel::post(const Work& work, const Limit& limit) {
  fence_lost(limit);
  Doing& doing = doing_.emplace_back(Doing{work});
  if (work.request->local.empty() || work.kind == Work::Kind::kNotify) return;
  Piece piece = work.piece;
  if (work.kind == Work::Kind::kCheck) Cutter(*work.request, max_piece_bytes()).next(piece);
  learn_keys(*work.request, piece, limit);
  Slices slices;
  const bool by_nics = slices_of(*work.request, piece, slices);
  bring_up(limit);
  if (work.kind == Work::Kind::kCheck) return;
  if (!rails_.is_any_up()) {
    if (only_) throw LinkDown(ErrorReason(rails_.reason(), FailureKind::kDevice));
    return;
  }
  if (!by_nics) return;
  doing.by_nics = true;
  doing.num_slices = slices.size();
  for (Slice& slice : slices) slice.work = first_doing_ + doing_.size() - 1;
  ready_.splice(ready_.end(), slices);
  pump(limit);
}

bool RdmaChannel::slices_of(const Request& request, const Piece& piece, Slices& slices) {
  const uint64_t share = piece.num_bytes / (kSlicesPerRail * rails_.size());
  const uint64_t slice_bytes = std::clamp(share, kMinSliceBytes, kMaxSliceBytes);
  if (!cut(request, piece, keys_, slice_bytes, slices, spare_)) return false;
  for (const Slice& slice : slices) {
    if (const RemoteRegion* const remote = keys_.find(slice)) rails_.want(slice, *remote);
  }
  return true;
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
  try {
    if (!doing.work.request->writes()) flush_gpus(doing.work.request->regions);
  } catch (const Refused& refused) {
    return {doing.num_bytes, refused.reason(), true};
  }
  if (doing.work.request->verify) {
    flush(limit);  // so that the peer's process sees what it compares
    compare(doing.work, limit);
    const Outcome verified = std::exchange(current_, {});
    if (!verified.refusal.empty()) return {doing.num_bytes, verified.refusal, true};
  }
  if (!doing.work.with_notify) return {doing.num_bytes, {}, true};
  Work notify = doing.work;
  notify.kind = Work::Kind::kNotify;
  Outcome outcome = over_connection(notify, limit);
  outcome.num_bytes = doing.num_bytes;
  outcome.is_counted = true;
  return outcome;
}

// NICs could not move it: the peer has the most precise reason.
Outcome RdmaChannel::ask_why_not(const Doing& doing, const Limit& limit) {
  Work check = doing.work;
  check.kind = Work::Kind::kCheck;
  Outcome outcome = over_connection(check, limit);
  if (outcome.refusal.empty()) outcome.refusal = {doing.why_lost, FailureKind::kDevice};
  if (outcome.refusal.empty()) {
    outcome.refusal = {kNotOnNics, FailureKind::kIncompatible};
  }
  outcome.num_bytes = doing.num_bytes;
  outcome.is_counted = true;
  return outcome;
}

Outcome RdmaChannel::over_connection(const Work& work, const Limit& limit) {
  if (work.with_notify || work.kind == Work::Kind::kNotify) flush(limit);
  TcpChannel::post(work, limit);
  return TcpChannel::finish(limit);
}

// Makes written data visible at the peer before the peer learns of it. A rail that fails meanwhile
// is taken down at both ends, which has the same effect.
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
  try {
    queries_.flush(flushed, limit);
  } catch (const Refused& refused) {  // by one of its NICs, or a GPU
    for (const uint32_t i : flushed) lose(rails_[i], RailDown(refused.what(), false), limit);
    queries_.flush({}, limit);  // its GPUs alone, which must be flushed all the same
  }
}

// Gives slices to rails, as far as they have room.
void RdmaChannel::pump(const Limit& limit) {
  bring_up(limit);
  while (!ready_.empty()) {
    Slice& slice = ready_.front();
    const RemoteRegion* const remote = keys_.find(slice);
    const bool is_wanted = remote && !doing_of(slice).has_lost;
    Rail* const rail = is_wanted ? rail_for(slice, *remote, limit) : nullptr;
    if (!rail) {
      if (only_ && !rails_.is_any_up())
        throw LinkDown(ErrorReason(rails_.reason(), FailureKind::kDevice));
      give_up(ready_, is_wanted ? rails_.why_none(slice, *remote) : "");
      continue;
    }
    if (!rail->has_room()) return;  // worth waiting for
    const auto on_nic = remote->on_nics[rail->peer_nic()];
    try {
      rail->submit(ready_, on_nic);
    } catch (const RailDown& down) {
      lose(*rail, down, limit);
    }
  }
}

// Null: none is up that reaches it, and none can be connected.
Rail* RdmaChannel::rail_for(const Slice& slice, const RemoteRegion& remote, const Limit& limit) {
  Rail* const rail = rails_.best(slice, remote);
  if (rail || !only_ || !rails_.is_any_up() || slice.num_tries >= kMaxTries) return rail;
  rails_.reach(slice, remote, queries_, limit);
  tell_trouble();
  return rails_.best(slice, remote);
}

// Its work alone fails, or goes over the connection: rails that are up have others to move.
void RdmaChannel::give_up(Slices& slices, const std::string& why) {
  Doing& doing = doing_of(slices.front());
  if (!std::exchange(doing.has_lost, true)) doing.why_lost = why;
  --doing.num_slices;
  slices.pop_front();
}

void RdmaChannel::collect(const Limit& limit) {
  for (Rail& rail : rails_) {
    if (!rail.is_up()) continue;
    Slices done;
    try {
      rail.collect(done);
      settle(done);
    } catch (const RailDown& down) {
      settle(done);
      lose(rail, down, limit);
    }
  }
}

void RdmaChannel::settle(Slices& done) {
  for (const Slice& slice : done) {
    Doing& doing = doing_of(slice);
    --doing.num_slices;
    doing.num_bytes += slice.num_bytes;
  }
  give_back(done, spare_);
}

void RdmaChannel::lose(Rail& rail, const RailDown& down, const Limit& limit) {
  Slices left = rail.close();
  const bool goes_on = down.is_refused && rail.forgive_refusal();  // with the keys asked for below
  if (!goes_on) rail.pause(down.what(), rail.peer_nic());
  tell_trouble();
  queries_.detach(rails_.index_of(rail), limit);
  while (!left.empty()) {
    Slice& slice = left.front();
    ++slice.num_tries;
    if (only_ && slice.num_tries >= kMaxTries && !rails_.is_any_up())
      throw LinkDown(ErrorReason(down.what(), FailureKind::kDevice));
    if (slice.num_tries >= kMostTries) {
      give_up(left, down.what());
    } else {
      ready_.splice(ready_.begin(), left, left.begin());
    }
  }
  if (!down.is_refused) return;
  std::vector<uint64_t> addresses;
  for (const Slice& slice : ready_) addresses.push_back(slice.segments.front().remote);
  addresses.resize(std::min<size_t>(addresses.size(), kMaxBatchRanges));
  keys_ = {};
  learn_keys(addresses, limit);
}

// Sleeps until a rail has something or must be given up, or the connection ends.
void RdmaChannel::sleep(const Limit& limit) {
  fds_ = {{limit.interrupt.fd(), POLLIN, 0}, {socket_.fd(), POLLIN, 0}};
  Deadline until = limit.deadline;
  for (Rail& rail : rails_) {
    if (!rail.is_up()) continue;
    try {
      if (rail.arm()) return;
    } catch (const std::exception& error) {
      return lose(rail, RailDown(error.what(), false), limit);
    }
    for (const int fd : rail.queue().fds()) fds_.push_back({fd, POLLIN, 0});
    if (const Deadline patience = rail.patience(); patience.at() < until.at()) until = patience;
  }
  if (poll(fds_.data(), fds_.size(), until.poll_ms()) < 0 && errno != EINTR) {
    throw SystemError(errno, "poll");
  }
  limit.check();
  if (fds_[1].revents && !socket_.at_rest()) throw LinkDown(closed_by_peer());
}

}  // namespace mk::transfer
