// PrimaryContext: holds the primary context of a GPU, which is that of the CUDA runtime, and so of
// torch. CurrentContext: makes it current in this thread for as long as it lives.
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
