// Copies a piece to and from memory of a peer on this machine.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/check.h"
#include "common/run_copier.h"
#include "transfer/error.h"
#include "transfer/shm/remote_memory.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kStepBytes = 4ull << 20;  // copied between checks of the limit
// Ranges per system call: more do not make it faster, and it cannot be interrupted.
constexpr size_t kMaxCallRanges = 512;

}  // namespace

uint64_t RemoteMemory::Copy::num_gpu_bytes() const {
  uint64_t num_bytes = 0;
  for (const Step& step : steps_) num_bytes += step.remote_device >= 0 ? step.num_bytes : 0;
  return num_bytes;
}

void RemoteMemory::Copy::run(const Limit& limit, uint64_t& num_bytes_done) {
  for (size_t begin = 0; begin < steps_.size();) {
    size_t end = begin + 1;
    while (end < steps_.size() && steps_[end].by == steps_[begin].by) ++end;
    switch (steps_[begin].by) {
      case By::kMapping:
        copy_mapped(begin, end, limit, num_bytes_done);
        break;
      case By::kAddress:
        copy_by_address(begin, end, limit, num_bytes_done);
        break;
      case By::kGpu:
        copy_by_gpu(begin, end, limit, num_bytes_done);
        break;
    }
    begin = end;
  }
}

void RemoteMemory::Copy::copy_by_gpu(size_t begin, size_t end, const Limit& limit,
                                     uint64_t& num_bytes_done) {
  std::vector<GpuCopy> copies;
  for (size_t i = begin; i < end; ++i) {
    const Step& step = steps_[i];
    const uint64_t dst = writes_ ? step.remote : step.local;
    const uint64_t src = writes_ ? step.local : step.remote;
    const int from = writes_ ? step.local_device : step.remote_device;
    const int to = writes_ ? step.remote_device : step.local_device;
    const int other = from < 0 || to < 0 ? kAnyHost : to;
    copies.push_back({dst, src, step.num_bytes, from >= 0 ? from : to, other});
  }
  queue_->copy(copies, limit, num_bytes_done);
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
        copier.emplace(request_bytes_, now);
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
    // The call stops where memory is missing or inaccessible.
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
