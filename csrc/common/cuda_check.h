// MK_CUDA(call): throws CudaError with CUDA's own message. For .cu files only.
//
// Layer: common.
#pragma once

#include <cuda_runtime.h>

#include "common/check.h"

#define MK_CUDA(call)                                                                           \
  do {                                                                                          \
    const cudaError_t mk_error = (call);                                                        \
    if (mk_error != cudaSuccess) {                                                              \
      cudaGetLastError(); /* cleared, so that the next call does not report it again */         \
      throw ::mk::CudaError(::mk::concat("CUDA: ", #call, ": ", cudaGetErrorString(mk_error))); \
    }                                                                                           \
  } while (false)
