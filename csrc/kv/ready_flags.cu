#include "common/cuda_check.h"
#include "kv/ready_flags.h"
#include "kv/ready_flags_kernel.cuh"

namespace mk::kv {

void launch_signal_flag(const SignalFlagParams& params, void* stream) {
  signal_flag_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(params);
  MK_CUDA(cudaGetLastError());
}

void launch_wait_flag(const WaitFlagParams& params, void* stream) {
  wait_flag_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(params);
  MK_CUDA(cudaGetLastError());
}

}  // namespace mk::kv
