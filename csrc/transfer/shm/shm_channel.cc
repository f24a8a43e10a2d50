#include "transfer/shm/shm_channel.h"

#include <algorithm>
#include <cerrno>
#include <string>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/net/stream.h"
#include "transfer/wire/reject_reason.h"

namespace mk::transfer {
namespace {

constexpr char kHidden[] = "the listener on this machine belongs to another PID namespace";
constexpr char kOtherUser[] = "the peer is of another user, whose memory is not shared";
constexpr char kNoPath[] = "cuda_ipc does not reach the memory";
constexpr std::chrono::milliseconds kAskEvery(50);  // a peer that has more regions than it may tell

}  // namespace

bool ShmChannel::reaches(const std::vector<SocketAddress>& addresses, const LocalUsers& users,
                         const Paths& paths, ErrorReason& why_not) {
  Interrupt unused;
  try {
    const Socket socket = Socket::connect(addresses, {Deadline::after(0), unused});
    if (socket.is_own()) return true;
    const uid_t user = socket.peer_user().value_or(0);
    if (is_own_user(user)) {
      why_not = {kHidden, FailureKind::kUnreachable};
    } else if (!users.admit(user)) {
      why_not = {listener_of_another(), FailureKind::kDenied};
    } else if (!paths.shm) {
      why_not = {kOtherUser, FailureKind::kIncompatible};
    } else {
      return true;
    }
  } catch (const Ended&) {
    return true;  // somebody has too many newcomers already; connect() waits, and sees who it is
  } catch (const Failure& failure) {
    why_not = {concat("no engine of this machine answers there (", failure.what(), ")"),
               failure.kind};
  }
  return false;
}

void ShmChannel::connect(const Limit& limit) {
  TcpChannel::connect(limit);
  shares_ = socket_.is_own();
  maps_all_ = false;
  if (shares_) learn_regions(limit);
}

// A child that a killed peer has forked may keep the connection open.
bool ShmChannel::connected() const {
  if (!TcpChannel::connected()) return false;
  return !shares_ || (remote_ && (!has_liveness_ || remote_->peer_lives()));
}

void ShmChannel::disconnect() noexcept {
  {
    const std::unique_lock lock(mutex_);
    remote_.reset();
  }
  page_.reset();
  memories_.clear();
  gpus_.clear();
  TcpChannel::disconnect();
}

void ShmChannel::close() noexcept {
  TcpChannel::close();
  queue_.close();
}

void ShmChannel::learn_regions(const Limit& limit) {
  drain(limit);
  const auto entries = query<RegionEntry>(Op::kRegions, ControlPage::kNumSlots, limit);
  if (!page_) {
    auto page = std::make_shared<ControlPage>(socket_.receive_fd(limit));
    if (!page->is_whole()) throw Failure(protocol_error("the control page is too small"));
    has_liveness_ = Liveness::is_alive(page->liveness());
    page_ = std::move(page);
  }
  num_told_ = entries.size();
  told_ = std::chrono::steady_clock::now();
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
    if (!part.memory) throw Failure(protocol_error("a region in memory that was given up"));
    told[entry.memory] = true;
    if (entry.offset > part.memory->num_bytes() ||
        entry.num_bytes > part.memory->num_bytes() - entry.offset) {
      throw Failure(protocol_error("a region ends beyond its memory"));
    }
  }
  for (size_t i = 0; i < told.size(); ++i) {
    if (!told[i]) memories_[i].reset();  // the peer has removed it and relies on that
  }
  learn_gpus(parts, limit);
  maps_all_ = std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.memory; });
  auto remote = std::make_shared<RemoteMemory>(page_, std::move(parts),
                                               by_address_ ? socket_.peer_process() : 0);
  const std::unique_lock lock(mutex_);
  remote_ = std::move(remote);
}

// An answer of thousands of regions costs more than moving a little over the connection.
bool ShmChannel::may_know_more() const {
  if (!shares_) return false;
  return num_told_ < ControlPage::kNumSlots ||
         std::chrono::steady_clock::now() - told_ >= kAskEvery;
}

// Open mappings stay open as long as the peer has a region in them.
void ShmChannel::learn_gpus(std::vector<RemoteMemory::Part>& parts, const Limit& limit) {
  const auto on_gpu = [](const RemoteMemory::Part& part) { return part.entry.location != 0; };
  std::vector<GpuEntry> entries;
  if (paths_.cuda_ipc && std::any_of(parts.begin(), parts.end(), on_gpu)) {
    entries = query<GpuEntry>(Op::kGpus, ControlPage::kNumSlots, limit);
  }
  std::vector<std::shared_ptr<GpuMapping>> gpus;
  for (const GpuEntry& entry : entries) {
    const auto is_it = [&](const auto& mapping) { return mapping->is_of(entry); };
    const auto known = std::find_if(gpus_.begin(), gpus_.end(), is_it);
    if (std::none_of(gpus.begin(), gpus.end(), is_it)) {
      gpus.push_back(known != gpus_.end() ? *known : std::make_shared<GpuMapping>(entry));
    }
    for (RemoteMemory::Part& part : parts) {
      if (!on_gpu(part) || part.entry.address != entry.address) continue;
      part.gpu = *std::find_if(gpus.begin(), gpus.end(), is_it);
      part.gpu_offset = entry.offset;
    }
  }
  gpus_ = std::move(gpus);
}

// False if it cannot be done here: then the peer decides, over the connection.
bool ShmChannel::copy(const Work& work, const Limit& limit, GpuQueue* queue, Outcome& outcome,
                      ErrorReason& why_not) {
  if (!remote_) return false;
  auto copy = remote_->prepare(*work.request, work.piece, {paths_.shm, queue}, why_not);
  if (!copy) return false;
  const auto check_peer = [&] {  // the first costs nothing, the second a system call
    if (!remote_->peer_lives() && !connected()) throw LinkDown(closed_by_peer());
  };
  check_peer();  // else its process id may have been reused
  uint64_t num_bytes = 0;
  copy->run(limit, num_bytes);
  check_peer();
  outcome.num_bytes += num_bytes;
  count(work, copy->num_gpu_bytes(), outcome);
  return true;
}

// Copies by GPUs are counted as a separate path.
void ShmChannel::count(const Work& work, uint64_t num_gpu_bytes, Outcome& outcome) {
  if (num_gpu_bytes == 0 || !paths_.shm || !counters_) return;
  PathCounters& counters = counters_->path("cuda_ipc");
  (work.request->writes() ? counters.num_bytes_written : counters.num_bytes_read) +=
      outcome.num_bytes;
  counters.num_pieces += 1;
  outcome.is_counted = true;
}

std::optional<Outcome> ShmChannel::run(const Work& work, const Limit& limit) {
  const Request& request = *work.request;
  if (request.local.empty() || work.with_notify || request.verify || must_fence()) {
    return std::nullopt;
  }
  const std::shared_lock lock(mutex_);
  Outcome outcome;
  if (work.kind == Work::Kind::kCheck) {
    if (!remote_ || !remote_->covers(request)) return std::nullopt;
    return outcome;
  }
  try {
    ErrorReason why_not;
    if (!copy(work, limit, nullptr, outcome, why_not)) return std::nullopt;
  } catch (const Inaccessible& fault) {
    outcome.refusal = fault.reason();
  } catch (const std::exception&) {
    return std::nullopt;  // if posted, it runs in a thread that can reconnect
  }
  return outcome;
}

void ShmChannel::move(const Work& work, const Limit& limit) {
  drain(limit);
  ErrorReason why_not;
  const auto try_copy = [&] {
    const std::shared_lock lock(mutex_);
    why_not = {};
    return copy(work, limit, &queue_, current_, why_not);
  };
  try {
    if (try_copy()) return;
    if (may_know_more()) {
      learn_regions(limit);
      if (try_copy()) return;
    }
  } catch (const Inaccessible& fault) {  // the connection has no part in it
    current_.refusal = fault.reason();
    return;
  } catch (const SystemError& error) {
    if (error.code().value() != EPERM && error.code().value() != ENOSYS) throw;
    by_address_ = false;
    learn_regions(limit);
  }
  if (paths_.shm) return TcpChannel::move(work, limit);
  if (why_not.empty()) TcpChannel::check(work, limit), drain(limit);
  if (current_.refusal.empty()) {
    current_.refusal = why_not.empty() ? ErrorReason(kNoPath, FailureKind::kIncompatible) : why_not;
  }
}

Path ShmChannel::path_to(const Range& range, int device) const {
  if (!shares_) {
    return {"connection", "",
            concat("the bytes go by a connection within the machine: ", kOtherUser)};
  }
  const std::string remote = concat("process ", socket_.peer_process());
  const RemoteMemory::Reach reach = remote_->reach(range, device);
  if (reach.mapped) {
    return {"mapped", remote,
            concat("the region is of shared memory, which is mapped here",
                   reach.by_gpu ? ", and the GPU copies" : "")};
  }
  if (reach.by_gpu && reach.error.empty()) {
    return {"ipc", remote, "the peer's GPU memory is opened here, and GPUs copy"};
  }
  if (reach.error.empty()) {
    return {"process_vm", remote,
            "the region is not of shared memory; process_vm_readv and process_vm_writev reach it"};
  }
  return {"connection", remote,
          concat("the bytes go by a connection within the machine: ", reach.error)};
}

void ShmChannel::check(const Work& work, const Limit& limit) {
  if (shares_ && !remote_->covers(*work.request) && may_know_more()) learn_regions(limit);
  if (!shares_ || !remote_->covers(*work.request)) TcpChannel::check(work, limit);
}

}  // namespace mk::transfer
