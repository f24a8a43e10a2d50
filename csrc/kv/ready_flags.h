// signal_flag and wait_flag: one side stores a step number once its writes are done; the other
// waits for it. Either side may be a stream, a CUDA graph, a CPU thread or a NIC.
//
//   signal: *flag = value + *step                 (release)
//   wait:   while *flag < value + *step: pause    (acquire; not beyond timeout_ns)
//
// A flag is never reset: it holds the last step that is ready, and a waiter compares. A CUDA graph
// bakes in its arguments, so a step that changes between replays is read from memory when the
// kernel runs.
//
// Flags lie in pinned host memory: a CPU thread sets and reads them without a CUDA call (which
// could itself wait for the device), a NIC can write them, and a GPU reaches them in about a
// microsecond. The driver's cuStreamWaitValue64 takes only constants and has no deadline: a killed
// peer would hang the device. Layer: kv. Python: mooncake_kernels/kv/layer_stream.py,
// ready_flags.py.
#pragma once

#include <cstdint>

#include "kv/flag_memory.h"

namespace mk::kv {

// Records the first wait that was given up. It stays until the host clears it, and meanwhile no
// other wait blocks: a graph with 80 waits gives up once, not 80 times.
struct WaitReport {
  static constexpr int64_t kTimedOut = 1, kAborted = 2;  // kAborted: written by the host
  static constexpr int64_t kClaimed = -1;                // the rest is being written

  int64_t state;  // 0: none
  int64_t flag;   // its address
  int64_t wanted;
  int64_t seen;
};

enum class WaitResult : int64_t { kReady = 0, kTimedOut = 1, kGivenUp = 2 };  // 2: by another wait

// A step: a number, or a number added to one in memory.
struct FlagStep {
  int64_t value;
  const int64_t* base;  // may be null

  MK_HD int64_t get() const { return base ? value + *base : value; }
};

struct SignalFlagParams {
  int64_t* flag;
  FlagStep step;

  MK_HD void run() const { store_release(flag, step.get()); }
};

struct WaitFlagParams {
  const int64_t* flag;
  FlagStep step;
  WaitReport* report;  // may be null
  int64_t timeout_ns;

  MK_HD WaitResult run() const {
    const int64_t wanted = step.get();
    if (load_acquire(flag) >= wanted) return WaitResult::kReady;
    for (const int64_t begin = now_ns();;) {
      if (report && load_acquire(&report->state) != 0) return WaitResult::kGivenUp;
      const int64_t waited_ns = now_ns() - begin;  // before the last look at the flag
      if (load_acquire(flag) >= wanted) return WaitResult::kReady;
      if (waited_ns >= timeout_ns) return WaitResult::kTimedOut;
      pause(waited_ns);
    }
  }

  MK_HD void report_timeout() const {
    if (!report || !claim(&report->state, WaitReport::kClaimed)) return;
    report->flag = reinterpret_cast<int64_t>(flag);
    report->wanted = step.get();
    report->seen = load_acquire(flag);
    store_release(&report->state, WaitReport::kTimedOut);  // last: the host polls it
  }
};

// Queued on `stream` (a cudaStream_t) of the current device; every address must be reachable by the
// device and stay alive until the kernel has run. A wait occupies one thread. What it waits for
// must neither require an idle device nor be behind it on its stream. Throw CudaError.
void launch_signal_flag(const SignalFlagParams& params, void* stream);
void launch_wait_flag(const WaitFlagParams& params, void* stream);

}  // namespace mk::kv
