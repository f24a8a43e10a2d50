// MK_HD marks what g++ and nvcc both compile: the index arithmetic of every kernel. Because the
// host loop calls the very functions that the CUDA kernel calls, a machine without a GPU tests
// them.
#pragma once

#if defined(__CUDACC__)
#define MK_HD __host__ __device__ __forceinline__
#else
#define MK_HD inline
#endif
