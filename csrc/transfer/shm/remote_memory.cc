#include "transfer/shm/remote_memory.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <tuple>
#include <utility>

#include "common/check.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

constexpr char kNotOfGpus[] = "cuda_ipc moves memory of GPUs, and neither end is";
constexpr char kNotOpened[] = "the peer's GPU memory cannot be opened here: ";
constexpr char kNotMapped[] = "the peer's memory is not mapped here, where a GPU could reach it";

// The setting, if any, that may forbid a process to access another.
std::string yama() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope ? concat(" (kernel.yama.ptrace_scope is ", scope, ")") : "";
}

Rights needed_for(const Request& request) { return request.writes() ? kRemoteWrite : kRemoteRead; }

}  // namespace

RemoteMemory::RemoteMemory(std::shared_ptr<const ControlPage> page, std::vector<Part> parts,
                           pid_t process)
    : page_(std::move(page)), parts_(std::move(parts)), process_(process) {
  // Windows after the regions around them, so that find_region() comes upon them.
  std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) {
    const auto key = [](const RegionEntry& entry) {
      return std::tuple(entry.address, ~entry.num_bytes, entry.rights & kRemoteRights);
    };
    return key(a.entry) < key(b.entry);
  });
}

const RemoteMemory::Part* RemoteMemory::find(const Range& range, Rights needed) const {
  const auto part = find_region(parts_, range, [](const Part& part) {
    return Range{part.entry.address, part.entry.num_bytes};
  });
  if (part == parts_.end()) return nullptr;
  const bool on_gpu = part->entry.location != 0;
  const bool reachable = on_gpu ? part->gpu != nullptr : part->memory || process_ != 0;
  return reachable && !(needed & ~part->entry.rights) ? &*part : nullptr;
}

bool RemoteMemory::covers(const Request& request) const {
  const Rights needed = needed_for(request);
  const Ranges ranges = request.ranges(request.remote);
  for (size_t i = 0; i < ranges.count; ++i) {
    const Part* const part = find(ranges[i], needed);
    if (!part || !page_->stands(part->offer())) return false;
  }
  return true;
}

RemoteMemory::Reach RemoteMemory::reach(const Range& range, int local_device) const {
  const Part* const part = find(range, 0);
  if (!part) return {false, false, "the peer has not told where such a region is"};
  if (part->memory) return {true, local_device >= 0};
  const ControlPageUse use(*page_, part->offer());
  if (!use) return {false, false, "the region is closed"};
  if (part->gpu) {
    return {false, true, part->gpu->open() ? "" : concat(kNotOpened, part->gpu->why_not())};
  }
  if (local_device >= 0) return {false, false, kNotMapped};
  char byte;
  const iovec local{&byte, 1};
  const iovec remote{reinterpret_cast<void*>(range.address), 1};
  if (process_vm_readv(process_, &local, 1, &remote, 1, 0) == 1) return {};
  const SystemError error(errno, "process_vm_readv");
  return {false, false, concat(error.what(), yama())};
}

std::optional<RemoteMemory::Copy::Step> RemoteMemory::step(const Part& part, const Range& local,
                                                           uint64_t remote, int local_device,
                                                           const Means& means,
                                                           ErrorReason& why_not) const {
  const bool by_gpu = part.gpu || local_device >= 0;
  if (by_gpu && !means.queue) return std::nullopt;
  if (!by_gpu && !means.host) why_not = {kNotOfGpus, FailureKind::kIncompatible};
  if (part.gpu && !part.gpu->open()) {
    why_not = {concat(kNotOpened, part.gpu->why_not()), FailureKind::kDevice};
  }
  if (by_gpu && !part.gpu && !(part.memory && means.host)) {
    why_not = {kNotMapped, FailureKind::kIncompatible};
  }
  if (!why_not.empty()) return std::nullopt;
  Copy::Step step{local.address, remote, local.num_bytes, Copy::By::kAddress, local_device, -1};
  const uint64_t offset = remote - part.entry.address;
  if (part.gpu) {
    step.remote = part.gpu->base() + part.gpu_offset + offset;
    step.remote_device = part.gpu->device();
  } else if (part.memory) {
    step.remote = reinterpret_cast<uint64_t>(part.memory->data()) + part.entry.offset + offset;
    step.by = Copy::By::kMapping;
  }
  if (by_gpu) step.by = Copy::By::kGpu;
  return step;
}

std::optional<RemoteMemory::Copy> RemoteMemory::prepare(const Request& request, const Piece& piece,
                                                        const Means& means,
                                                        ErrorReason& why_not) const {
  const Rights needed = needed_for(request);
  const GpuRanges here(request.regions);
  Copy copy;
  copy.writes_ = request.writes();
  copy.request_bytes_ = request.num_bytes;
  copy.process_ = process_;
  copy.queue_ = means.queue;
  copy.steps_.reserve(piece.num_ranges);
  bool all = true;
  for_each_range(request, piece, [&](uint64_t local, uint64_t remote, uint64_t num_bytes) {
    if (!all) return;
    const Part* part = find({remote, num_bytes}, needed);
    const auto& uses = copy.uses_;
    const auto in_use = [&](const auto& use) { return use.first == part; };
    if (part && std::none_of(uses.rbegin(), uses.rend(), in_use)) {
      copy.uses_.emplace_back(part, ControlPageUse(*page_, part->offer()));
      if (!copy.uses_.back().second) part = nullptr;
    }
    const int device = here.empty() ? -1 : here.device_of(local);
    const auto found =
        part ? step(*part, {local, num_bytes}, remote, device, means, why_not) : std::nullopt;
    all = found.has_value();
    if (all) copy.steps_.push_back(*found);
  });
  if (!all) return std::nullopt;
  return copy;
}

}  // namespace mk::transfer
