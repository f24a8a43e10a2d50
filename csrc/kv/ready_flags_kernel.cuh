// The device code of ready_flags: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "kv/ready_flags.h"

namespace mk::kv {

// Writes of earlier kernels on its stream are visible to it and, through its release store, to any
// thread that sees the store.
__global__ void __launch_bounds__(1)
    signal_flag_kernel(const __grid_constant__ SignalFlagParams p) {
  p.run();
}

__global__ void __launch_bounds__(1) wait_flag_kernel(const __grid_constant__ WaitFlagParams p) {
  if (p.run() == WaitResult::kTimedOut) p.report_timeout();
}

}  // namespace mk::kv
