// Properties of the current CUDA device. For .cu files only.
//
// Layer: common.
#pragma once

#include "common/cuda_check.h"

namespace mk {

inline int num_sms() {
  int device = 0, count = 0;
  MK_CUDA(cudaGetDevice(&device));
  MK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace mk
