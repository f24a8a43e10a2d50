// MK_HD marks code for both g++ and nvcc: the index arithmetic of every kernel. The host loop calls
// the same functions as the CUDA kernel, so a machine without a GPU tests them.
//
// Layer: common.
#pragma once

#if defined(__CUDACC__)
#define MK_HD __host__ __device__ __forceinline__
#else
#define MK_HD inline
#endif
