#include "transfer/shm_channel.h"

#include <cerrno>
#include <string>

#include "common/check.h"
#include "transfer/error.h"

namespace mk::transfer {

bool ShmChannel::reaches(const std::vector<SocketAddress>& addresses, std::string& why_not) {
  const Interrupt nobody;
  try {
    if (Socket::connect(addresses, {Deadline::after(1), nobody}).peer_process() != 0) return true;
    why_not = "who listens there within this machine is of another user or PID namespace";
  } catch (const Failure& failure) {
    why_not = concat("nobody answers there within this machine (", failure.what(), ")");
  }
  return false;
}

void ShmChannel::connect(const Limit& limit) {
  WireChannel::connect(limit);
  learn_regions(limit);
}

void ShmChannel::disconnect() noexcept {
  {
    const std::unique_lock lock(mutex_);
    remote_.reset();
  }
  board_.reset();
  memories_.clear();
  WireChannel::disconnect();
}

void ShmChannel::learn_regions(const Limit& limit) {
  drain(limit);
  const BatchHeader header{Op::kRegions, 0, ++num_questions_, 0, 0};
  socket_.send(&header, sizeof(header), limit);
  Ack ack;
  socket_.receive(&ack, sizeof(ack), limit);
  check_regions_ack(ack, num_questions_);
  std::vector<RegionEntry> entries(ack.num_bytes / sizeof(RegionEntry));
  socket_.receive(entries.data(), ack.num_bytes, limit);
  if (!board_) {
    auto board = std::make_shared<Board>(socket_.receive_fd(limit));
    if (!board->is_whole()) throw Failure("protocol error: the board is too small");
    board_ = std::move(board);
  }
  std::vector<RemoteMemory::Part> parts;
  std::vector<bool> told(memories_.size());
  for (const RegionEntry& entry : entries) {
    check_region(entry, memories_.size() + 1);
    if (entry.memory == memories_.size()) {
      memories_.push_back(std::make_shared<SharedMemory>(socket_.receive_fd(limit)));
      told.push_back(true);
    }
    RemoteMemory::Part& part = parts.emplace_back(RemoteMemory::Part{entry, nullptr});
    if (entry.memory == kNoMemory) continue;
    part.memory = memories_[entry.memory];
    if (!part.memory) throw Failure("protocol error: a region in memory that was given up");
    told[entry.memory] = true;
    if (entry.offset > part.memory->num_bytes() ||
        entry.num_bytes > part.memory->num_bytes() - entry.offset) {
      throw Failure("protocol error: a region ends behind its memory");
    }
  }
  for (size_t i = 0; i < told.size(); ++i) {
    if (!told[i]) memories_[i].reset();  // the peer has given it up, and counts on
  }
  auto remote = std::make_shared<RemoteMemory>(board_, std::move(parts),
                                               by_address_ ? socket_.peer_process() : 0);
  const std::unique_lock lock(mutex_);
  remote_ = std::move(remote);
}

// False if it is not to be had here: then the peer, over the connection, has the last word.
bool ShmChannel::copy(const Work& work, const Limit& limit, uint64_t& num_bytes_done) {
  if (!remote_) return false;
  std::optional<RemoteMemory::Copy> copy = remote_->prepare(*work.request, work.piece);
  if (!copy) return false;
  uint64_t num_bytes = 0;
  copy->run(limit, num_bytes);
  if (!socket_.at_rest()) throw LinkDown("connection closed by peer");
  num_bytes_done += num_bytes;
  return true;
}

std::optional<Outcome> ShmChannel::run(const Work& work, const Limit& limit, Interrupt&) {
  if (work.request->local.empty() || work.with_notify || must_fence()) return std::nullopt;
  const std::shared_lock lock(mutex_);
  Outcome outcome;
  try {
    if (!copy(work, limit, outcome.num_bytes)) return std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;  // posted, it has a thread that can connect anew
  }
  return outcome;
}

void ShmChannel::move(const Work& work, const Limit& limit) {
  drain(limit);
  const auto try_copy = [&] {
    const std::shared_lock lock(mutex_);
    return copy(work, limit, current_.num_bytes);
  };
  try {
    if (try_copy()) return;
    learn_regions(limit);
    if (try_copy()) return;
  } catch (const SystemError& error) {
    if (error.code().value() != EPERM && error.code().value() != ENOSYS) throw;
    by_address_ = false;
    learn_regions(limit);
  }
  WireChannel::move(work, limit);
}

Way ShmChannel::way_to(const Range& range) const {
  const std::string remote = concat("process ", socket_.peer_process());
  const RemoteMemory::Reach reach = remote_->reach(range);
  if (reach.mapped) {
    return {"mapped", remote, "the region is of shared memory, which is mapped here"};
  }
  if (reach.error.empty()) {
    return {"process_vm", remote,
            "the region is not of shared memory; process_vm_readv and process_vm_writev reach it"};
  }
  return {"connection", remote,
          concat("the bytes go by a connection within the machine: ", reach.error)};
}

void ShmChannel::check(const Work& work, const Limit& limit) {
  if (!remote_->covers(*work.request)) learn_regions(limit);
  if (!remote_->covers(*work.request)) WireChannel::check(work, limit);
}

}  // namespace mk::transfer
