// The CUDA driver, opened when first asked for: host code that links no CUDA library.
#pragma once

#if __has_include(<cuda.h>)
#define MK_HAVE_CUDA_H 1
#include <cuda.h>

#include "common/dynlib.h"

namespace mk {

#define MK_CUDA_DRIVER_FUNCTIONS(X) X(cuInit) X(cuDriverGetVersion) X(cuDeviceGetCount)
MK_DYNLIB(CudaDriver, "libcuda.so.1", MK_CUDA_DRIVER_FUNCTIONS)

}  // namespace mk
#else
#define MK_HAVE_CUDA_H 0
#endif
