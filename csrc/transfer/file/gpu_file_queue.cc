#include "transfer/file/gpu_file_queue.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <exception>

#include "common/check.h"
#include "common/cuda_context.h"
#include "common/thread.h"

namespace mk::transfer {
namespace {

constexpr size_t kNumThreads = 8;  // calls of up to 1 MiB in flight

}  // namespace

GpuFileQueue::GpuFileQueue(const GpuFile& file, size_t num_slots)
    : file_(file),
      num_slots_(num_slots),
      event_(MK_SYSCALL(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE), "eventfd")) {
  try {
    for (size_t i = 0; i < std::min(num_slots, kNumThreads); ++i) {
      threads_.push_back(start_thread([this] { work(); }));
    }
  } catch (...) {
    stop();
    throw;
  }
}

GpuFileQueue::~GpuFileQueue() { stop(); }

void GpuFileQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void GpuFileQueue::push(size_t slot, const IoCall& call) {
  {
    const std::lock_guard lock(mutex_);
    pushed_.push_back({slot, call});
  }
  changed_.notify_one();
}

IoDone GpuFileQueue::next(const Limit& limit) {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (!done_.empty()) {
        const IoDone done = done_.front();
        done_.pop_front();
        eventfd_t one;
        eventfd_read(event_.get(), &one);
        return done;
      }
    }
    wait_ready(event_.get(), POLLIN, limit);
  }
}

void GpuFileQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stops_ || !pushed_.empty(); });
    if (stops_) return;
    const Pushed next = pushed_.front();
    pushed_.pop_front();
    lock.unlock();
    const int64_t result = make(next.call);
    lock.lock();
    done_.push_back({next.slot, result});
    eventfd_write(event_.get(), 1);
  }
}

#if MK_HAVE_CUDA_H

// As preadv(2) and pwritev(2): if bytes were moved before an error, returns their number.
int64_t GpuFileQueue::make(const IoCall& call) const {
  try {
    const PrimaryContext context(call.device);
    const CurrentContext current(context);
    uint64_t done = 0;
    for (size_t i = 0; i < call.num_parts; ++i) {
      auto* const memory = static_cast<char*>(call.parts[i].iov_base);
      const uint64_t num_bytes = call.parts[i].iov_len;
      const uint64_t offset = call.offset + done;
      const int64_t result = call.kind == IoCall::Kind::kWrite
                                 ? file_.write(memory, num_bytes, offset)
                                 : file_.read(memory, num_bytes, offset);
      if (result < 0) return done > 0 ? static_cast<int64_t>(done) : result;
      done += static_cast<uint64_t>(result);
      if (static_cast<uint64_t>(result) < num_bytes) break;
    }
    return static_cast<int64_t>(done);
  } catch (const std::exception&) {
    return kGpuFileError;  // the retry through host memory will report the GPU's error
  }
}

#else

int64_t GpuFileQueue::make(const IoCall&) const { return kGpuFileError; }

#endif

}  // namespace mk::transfer
