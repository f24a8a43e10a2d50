// The parts of the CUDA driver that the transfer engine uses, one table per purpose.
//
// Layer: transfer. For .cc files only.
#pragma once

#include "common/cuda_context.h"

#if MK_HAVE_CUDA_H
namespace mk::transfer {

// clang-format off
#define MK_CUDA_COPY_FUNCTIONS(X)                                            \
  X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamWaitEvent) X(cuEventCreate) \
  X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuMemHostAlloc)       \
  X(cuMemFreeHost) X(cuDeviceCanAccessPeer) X(cuCtxEnablePeerAccess)
#define MK_CUDA_IPC_FUNCTIONS(X)                                         \
  X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle)      \
  X(cuMemGetAddressRange) X(cuDeviceGetUuid)
#define MK_CUDA_HOST_FUNCTIONS(X) X(cuLaunchHostFunc) X(cuStreamGetCtx)
// clang-format on
MK_DYNLIB(CudaCopy, kCudaDriverName, MK_CUDA_COPY_FUNCTIONS)
MK_DYNLIB(CudaIpc, kCudaDriverName, MK_CUDA_IPC_FUNCTIONS)
MK_DYNLIB(CudaHostFunction, kCudaDriverName, MK_CUDA_HOST_FUNCTIONS)

}  // namespace mk::transfer
#endif
