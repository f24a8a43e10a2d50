#include "transfer/remote_memory.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <utility>

#include "common/check.h"
#include "common/run_copier.h"
#include "transfer/error.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kStepBytes = 4ull << 20;  // copied between two looks at the limit
// Ranges of one system call: more make it no faster, and it cannot be interrupted.
constexpr size_t kMaxCallRanges = 512;

// What may be the reason why a process must not reach into another, if there is such a setting.
std::string yama() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope ? concat(" (kernel.yama.ptrace_scope is ", scope, ")") : "";
}

Rights needed_for(const Request& request) { return request.writes() ? kRemoteWrite : kRemoteRead; }

}  // namespace

RemoteMemory::RemoteMemory(std::shared_ptr<const Board> board, std::vector<Part> parts,
                           pid_t process)
    : board_(std::move(board)), parts_(std::move(parts)), process_(process) {
  std::sort(parts_.begin(), parts_.end(),
            [](const Part& a, const Part& b) { return a.entry.address < b.entry.address; });
}

const RemoteMemory::Part* RemoteMemory::find(const Range& range, Rights needed) const {
  const auto behind = std::upper_bound(
      parts_.begin(), parts_.end(), range.address,
      [](uint64_t address, const Part& part) { return address < part.entry.address; });
  if (behind == parts_.begin()) return nullptr;
  const Part& part = *std::prev(behind);
  const uint64_t offset = range.address - part.entry.address;
  const bool inside =
      offset < part.entry.num_bytes && range.num_bytes <= part.entry.num_bytes - offset;
  const bool reachable = part.memory || process_ != 0;
  return inside && reachable && !(needed & ~part.entry.rights) ? &part : nullptr;
}

bool RemoteMemory::covers(const Request& request) const {
  const Rights needed = needed_for(request);
  const Ranges ranges = request.ranges(request.remote);
  for (size_t i = 0; i < ranges.count; ++i) {
    if (!find(ranges[i], needed)) return false;
  }
  return true;
}

RemoteMemory::Reach RemoteMemory::reach(const Range& range) const {
  const Part* const part = find(range, 0);
  if (!part) return {false, "the peer has not told where such a region is"};
  if (part->memory) return {true};
  const BoardUse use(*board_, {part->entry.slot, part->entry.generation});
  if (!use) return {false, "the region is closed"};
  char byte;
  const iovec local{&byte, 1};
  const iovec remote{reinterpret_cast<void*>(range.address), 1};
  if (process_vm_readv(process_, &local, 1, &remote, 1, 0) == 1) return {};
  const SystemError error(errno, "process_vm_readv");
  return {false, concat(error.what(), yama())};
}

std::optional<RemoteMemory::Copy> RemoteMemory::prepare(const Request& request,
                                                        const Piece& piece) const {
  const Rights needed = needed_for(request);
  Copy copy;
  copy.writes_ = request.writes();
  copy.num_bytes_ = piece.num_bytes;
  copy.process_ = process_;
  copy.steps_.reserve(piece.num_ranges);
  const Part* part = nullptr;
  bool all = true;
  for_each_range(request, piece, [&](uint64_t local, uint64_t remote, uint64_t num_bytes) {
    if (!all) return;
    part = find({remote, num_bytes}, needed);
    const auto& uses = copy.uses_;
    const auto in_use = [&](const auto& use) { return use.first == part; };
    if (part && std::none_of(uses.rbegin(), uses.rend(), in_use)) {
      copy.uses_.emplace_back(part, BoardUse(*board_, {part->entry.slot, part->entry.generation}));
      if (!copy.uses_.back().second) part = nullptr;
    }
    all = part != nullptr;
    if (!all) return;
    uint64_t address = remote;
    if (part->memory) {
      address = reinterpret_cast<uint64_t>(part->memory->data()) + part->entry.offset +
                (remote - part->entry.address);
    }
    copy.steps_.push_back({local, address, num_bytes, part->memory != nullptr});
  });
  if (!all) return std::nullopt;
  return copy;
}

void RemoteMemory::Copy::run(const Limit& limit, uint64_t& num_bytes_done) {
  for (size_t begin = 0; begin < steps_.size();) {
    size_t end = begin + 1;
    while (end < steps_.size() && steps_[end].mapped == steps_[begin].mapped) ++end;
    if (steps_[begin].mapped) {
      copy_mapped(begin, end, limit, num_bytes_done);
    } else {
      copy_by_address(begin, end, limit, num_bytes_done);
    }
    begin = end;
  }
}

void RemoteMemory::Copy::copy_mapped(size_t begin, size_t end, const Limit& limit,
                                     uint64_t& num_bytes_done) {
  std::optional<RunCopier> copier;
  uint64_t run_bytes = 0, since_check = 0, pending = 0;
  const auto finish = [&] {
    if (copier) copier->finish();
    num_bytes_done += std::exchange(pending, 0);
  };
  for (size_t i = begin; i < end; ++i) {
    const Step& step = steps_[i];
    for (uint64_t done = 0; done < step.num_bytes;) {
      const uint64_t now = std::min(step.num_bytes - done, kStepBytes);
      if (now != run_bytes) {
        finish();
        copier.emplace(num_bytes_, now);
        run_bytes = now;
      }
      auto* const local = reinterpret_cast<char*>(step.local + done);
      auto* const remote = reinterpret_cast<char*>(step.remote + done);
      copier->add(writes_ ? Run{local, remote} : Run{remote, local});
      done += now;
      pending += now;
      since_check += now;
      if (since_check >= kStepBytes) {
        finish();
        limit.check();
        since_check = 0;
      }
    }
  }
  finish();
}

void RemoteMemory::Copy::copy_by_address(size_t begin, size_t end, const Limit& limit,
                                         uint64_t& num_bytes_done) {
  std::vector<iovec> local, remote;
  const auto call = writes_ ? process_vm_writev : process_vm_readv;
  uint64_t pending = 0;
  const auto flush = [&] {
    if (local.empty()) return;
    limit.check();
    const ssize_t moved =
        call(process_, local.data(), local.size(), remote.data(), remote.size(), 0);
    if (moved < 0 && errno == ESRCH) throw LinkDown("connection closed by peer");
    if (moved < 0) throw SystemError(errno, writes_ ? "process_vm_writev" : "process_vm_readv");
    num_bytes_done += moved;
    // It stops where memory is not there, or may not be touched.
    if (static_cast<uint64_t>(moved) != pending) throw Failure("registered memory is not mapped");
    local.clear();
    remote.clear();
    pending = 0;
  };
  for (size_t i = begin; i < end; ++i) {
    const Step& step = steps_[i];
    for (uint64_t done = 0; done < step.num_bytes;) {
      const uint64_t now = std::min(step.num_bytes - done, kStepBytes);
      local.push_back({reinterpret_cast<void*>(step.local + done), now});
      remote.push_back({reinterpret_cast<void*>(step.remote + done), now});
      done += now;
      pending += now;
      if (local.size() == kMaxCallRanges || pending >= kStepBytes) flush();
    }
  }
  flush();
}

}  // namespace mk::transfer
