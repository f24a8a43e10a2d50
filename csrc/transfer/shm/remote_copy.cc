// Copies a piece to and from memory of a peer on this machine.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/check.h"
#include "common/fault_guard.h"
#include "common/run_copier.h"
#include "transfer/base/error.h"
#include "transfer/net/stream.h"
#include "transfer/shm/remote_memory.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kStepBytes = 4ull << 20;  // copied between checks of the limit
// Ranges per system call: more do not make it faster, and it cannot be interrupted.
constexpr size_t kMaxCallRanges = 512;

constexpr char kLocal[] = "local ";
constexpr char kPeers[] = "the peer's ";

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
  uint64_t done = 0;  // of the step `begin`
  while (begin < end) {
    uint64_t pending = 0;
    const auto fault = guarded([&]() noexcept {
      std::optional<RunCopier> copier;
      for (uint64_t run_bytes = 0; begin < end && pending < kStepBytes;) {
        const Step& step = steps_[begin];
        const uint64_t now = std::min(step.num_bytes - done, kStepBytes);
        if (now != run_bytes) {
          if (copier) copier->finish();
          copier.emplace(request_bytes_, now);
          run_bytes = now;
        }
        auto* const local = reinterpret_cast<char*>(step.local + done);
        auto* const remote = reinterpret_cast<char*>(step.remote + done);
        copier->add(writes_ ? Run{local, remote} : Run{remote, local});
        pending += now;
        done += now;
        if (done == step.num_bytes) {
          ++begin;
          done = 0;
        }
      }
      if (copier) copier->finish();
    });
    if (fault) throw Inaccessible(side_of(*fault), fault->describe());
    num_bytes_done += pending;
    if (pending >= kStepBytes) limit.check();
  }
}

const char* RemoteMemory::Copy::side_of(const Fault& fault) const {
  for (const Step& step : steps_) {
    if (Range{step.local, step.num_bytes}.contains({fault.address, 1})) return kLocal;
    if (Range{step.remote, step.num_bytes}.contains({fault.address, 1})) return kPeers;
  }
  return "";
}

// The call stops where memory is missing or protected: at which end?
const char* RemoteMemory::Copy::side_of(const std::vector<iovec>& local) const {
  const bool is_local = std::any_of(local.begin(), local.end(), [&](const iovec& part) {
    return !is_accessible(part.iov_base, part.iov_len, /*for_write=*/!writes_);
  });
  return is_local ? kLocal : kPeers;
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
    if (moved < 0 && errno == ESRCH) throw LinkDown(closed_by_peer());
    if (moved < 0 && errno != EFAULT) {
      throw SystemError(errno, writes_ ? "process_vm_writev" : "process_vm_readv");
    }
    num_bytes_done += std::max<ssize_t>(moved, 0);
    if (moved < 0 || static_cast<uint64_t>(moved) != pending) {
      throw Inaccessible(side_of(local), "it is unmapped, protected or truncated");
    }
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
