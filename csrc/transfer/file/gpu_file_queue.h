// GpuFileQueue: the IoQueue of a GpuFile. Its calls block on the disk, so threads make them.
//
// Layer: transfer. Takes reads and writes of GPU memory. The destructor waits for the calls that
// have begun, until the disk ends them.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "common/fd.h"
#include "transfer/file/gpu_file.h"
#include "transfer/file/io_queue.h"

namespace mk::transfer {

class GpuFileQueue : public IoQueue {
 public:
  // `file` outlives it. Throws SystemError, std::system_error: no threads.
  GpuFileQueue(const GpuFile& file, size_t num_slots);
  GpuFileQueue(const GpuFileQueue&) = delete;
  ~GpuFileQueue() override;

  size_t num_slots() const override { return num_slots_; }
  void push(size_t slot, const IoCall& call) override;
  IoDone next(const Limit& limit) override;

 private:
  struct Pushed {
    size_t slot;
    IoCall call;
  };

  void work();
  void stop();
  int64_t make(const IoCall& call) const;

  const GpuFile& file_;
  const size_t num_slots_;
  const Fd event_;  // readable once something is done
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Pushed> pushed_;
  std::deque<IoDone> done_;
  bool stops_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace mk::transfer
