// PrimaryContext: holds the primary context of a GPU, the one that the CUDA runtime and so torch
// use. CurrentContext: makes it, or another one, current in this thread while the object lives.
// Meanwhile the thread may allocate and query events also where another thread of the program
// captures a graph: by default the driver refuses that, and the graph is lost.
//
// A PrimaryContext initializes CUDA and makes the context, if no one has. So there is one only of a
// GPU that the caller has named, or whose memory or streams he has; who can do without asks
// cuda_is_initialized() first. In a child forked after CUDA was initialized it is a CudaError.
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

// The driver's handle of a GPU. Does not initialize CUDA. Throws Unavailable, CudaError.
CUdevice device_handle(int device);

class PrimaryContext {
 public:
  explicit PrimaryContext(int device);  // throws Unavailable, CudaError
  PrimaryContext(const PrimaryContext&) = delete;
  ~PrimaryContext() { CudaDriver::get().p_cuDevicePrimaryCtxRelease(handle_); }

  CUcontext get() const { return context_; }
  int device() const { return device_; }  // its ordinal
  CUdevice handle() const { return handle_; }

 private:
  const int device_;
  CUdevice handle_ = 0;
  CUcontext context_ = nullptr;
};

class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context);  // throws CudaError
  explicit CurrentContext(const PrimaryContext& context) : CurrentContext(context.get()) {}
  CurrentContext(const CurrentContext&) = delete;
  ~CurrentContext();

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // then: the thread's own
};

// Throws Unavailable if a graph is being captured from the stream: it would be lost by what waits
// for the stream, or for an event in it.
void refuse_capture(CUstream stream);

}  // namespace mk
#endif
