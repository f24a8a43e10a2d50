// The CUDA driver, loaded on first use: for host code that links no CUDA library.
//
// Layer: common.
#pragma once

#if __has_include(<cuda.h>)
#define MK_HAVE_CUDA_H 1
#include <cuda.h>

#include "common/dynlib.h"

namespace mk {

constexpr const char* kCudaDriverName = "libcuda.so.1";

// clang-format off
#define MK_CUDA_DRIVER_FUNCTIONS(X)                                                      \
  X(cuInit) X(cuDriverGetVersion) X(cuDeviceGetCount) X(cuDeviceGet) X(cuGetErrorName)   \
  X(cuCtxGetCurrent) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuPointerGetAttributes)    \
  X(cuDevicePrimaryCtxGetState) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) \
  X(cuThreadExchangeStreamCaptureMode) X(cuStreamIsCapturing)
// clang-format on
MK_DYNLIB(CudaDriver, kCudaDriverName, MK_CUDA_DRIVER_FUNCTIONS)

// Looks up functions that older drivers lack.
#define MK_CUDA_PROC_ADDRESS_FUNCTIONS(X) X(cuGetProcAddress)
MK_DYNLIB(CudaProcAddress, kCudaDriverName, MK_CUDA_PROC_ADDRESS_FUNCTIONS)

// Whether anyone in this process has loaded the driver; does not load it.
bool cuda_driver_is_loaded();

// Whether anyone in this process has initialized CUDA; does not do it. A process that does not use
// CUDA must not be made to by the way: it would take memory of a GPU, and its forked children could
// not use CUDA any more. In a child of a process that has initialized it: false.
bool cuda_is_initialized();

// "CUDA_ERROR_INVALID_VALUE"
inline std::string cuda_error_name(CUresult error) {
  const char* name = nullptr;
  CudaDriver::get().p_cuGetErrorName(error, &name);
  return name ? name : concat("error ", static_cast<int>(error));
}

}  // namespace mk
#else
#define MK_HAVE_CUDA_H 0
#endif
