// signal_flag and wait_flag: one side stores a step number once its writes are done, the other
// waits until it is there. Streams, CUDA graphs, threads of the CPU and NICs may be on either side.
//
//   signal: *flag = value + *step                 (release)
//   wait:   while *flag < value + *step: pause    (acquire; not beyond timeout_ns)
//
// A flag is never reset: it holds the last step that is ready, and whoever waits compares. A CUDA
// graph bakes what it is given, so that a step which changes from one replay to the next is read
// from memory when the kernel runs.
//
// Flags lie in pinned host memory: a thread of the CPU sets and reads them without a call to CUDA
// (which could itself wait for the device), a NIC can write them, and a GPU reaches them in about a
// microsecond. The driver's cuStreamWaitValue64 would take constants alone, and have no deadline: a
// peer that was killed would hang the device.
// Layer: kv. Python: mooncake_kernels/kv/layer_stream.py, ready_flags.py.
#pragma once

#include <cstdint>

#include "kv/flag_memory.h"

namespace mk::kv {

// What a wait leaves behind that was given up: the first one of them. It stays until the host
// clears it, and as long as it is there, nobody else waits: a graph with 80 waits gives up once,
// not 80 times.
struct WaitReport {
  static constexpr int64_t kTimedOut = 1, kAborted = 2;  // kAborted: written by the host
  static constexpr int64_t kClaimed = -1;                // the rest is being written

  int64_t state;  // 0: none
  int64_t flag;   // its address
  int64_t wanted;
  int64_t seen;
};

enum class WaitResult : int64_t { kReady = 0, kTimedOut = 1, kGivenUp = 2 };  // 2: by another one

// A step: a number, or a number added to one that lies in memory.
struct FlagStep {
  int64_t value;
  const int64_t* base;  // or null

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
      const int64_t waited_ns = now_ns() - begin;  // before the flag, which gets a last look
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
    store_release(&report->state, WaitReport::kTimedOut);  // last: the host looks at it first
  }
};

// Queued on `stream` (a cudaStream_t) of the current device; every address must be one the device
// reaches, and alive until the kernel has run. A wait occupies one thread. What it waits for must
// not need the device to be idle, nor stand behind it on its stream. Throw CudaError.
void launch_signal_flag(const SignalFlagParams& params, void* stream);
void launch_wait_flag(const WaitFlagParams& params, void* stream);

}  // namespace mk::kv
