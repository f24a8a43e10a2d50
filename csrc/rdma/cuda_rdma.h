// The CUDA driver functions for GPUDirect RDMA, one table per driver version.
//
// Layer: rdma.
#pragma once

#include "common/cuda_driver.h"

#if MK_HAVE_CUDA_H
namespace mk::rdma {

#define MK_CUDA_RDMA_FUNCTIONS(X) \
  X(cuPointerGetAttribute) X(cuPointerSetAttribute) X(cuDeviceGetAttribute)
MK_DYNLIB(CudaRdma, kCudaDriverName, MK_CUDA_RDMA_FUNCTIONS)

// Drivers of CUDA 11.3, 11.7 and 12.1:
#define MK_CUDA_FLUSH_FUNCTIONS(X) X(cuFlushGPUDirectRDMAWrites)
MK_DYNLIB(CudaFlush, kCudaDriverName, MK_CUDA_FLUSH_FUNCTIONS)
#define MK_CUDA_DMABUF_FUNCTIONS(X) X(cuMemGetHandleForAddressRange)
MK_DYNLIB(CudaDmabuf, kCudaDriverName, MK_CUDA_DMABUF_FUNCTIONS)
#define MK_CUDA_CONTEXT_FLAGS_FUNCTIONS(X) X(cuCtxGetFlags) X(cuCtxSetFlags)
MK_DYNLIB(CudaContextFlags, kCudaDriverName, MK_CUDA_CONTEXT_FLAGS_FUNCTIONS)

}  // namespace mk::rdma
#endif
