// PrimaryContext: holds the primary context of a GPU, the one that the CUDA runtime and so torch
// use. CurrentContext: makes it current in this thread while the object lives.
//
//   const PrimaryContext context(0);
//   const CurrentContext current(context);
//   check_cuda(cuStreamCreate(...), "cuStreamCreate");
//
// Layer: common.
#pragma once

#include "common/cuda_driver.h"

#if MK_HAVE_CUDA_H
namespace mk {

// Throws CudaError: "CUDA: <function>: <name of the error>".
void check_cuda(CUresult result, const char* function);

class PrimaryContext {
 public:
  explicit PrimaryContext(int device);  // throws Unavailable, CudaError
  PrimaryContext(const PrimaryContext&) = delete;
  ~PrimaryContext() { CudaDriver::get().p_cuDevicePrimaryCtxRelease(device_); }

  CUcontext get() const { return context_; }
  int device() const { return device_; }

 private:
  const int device_;
  CUcontext context_ = nullptr;
};

class CurrentContext {
 public:
  explicit CurrentContext(const PrimaryContext& context);  // throws CudaError
  CurrentContext(const CurrentContext&) = delete;
  ~CurrentContext();
};

}  // namespace mk
#endif
