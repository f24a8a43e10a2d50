#include "common/cuda_context.h"

#if MK_HAVE_CUDA_H
#include "common/check.h"

namespace mk {

void check_cuda(CUresult result, const char* function) {
  if (result != CUDA_SUCCESS) {
    throw CudaError(concat("CUDA: ", function, ": ", cuda_error_name(result)));
  }
}

CUdevice device_handle(int device) {
  CUdevice handle = 0;
  check_cuda(CudaDriver::get().p_cuDeviceGet(&handle, device), "cuDeviceGet");
  return handle;
}

PrimaryContext::PrimaryContext(int device) : device_(device) {
  // Before it every other call fails. Once CUDA is initialized it does nothing.
  check_cuda(CudaDriver::get().p_cuInit(0), "cuInit");
  handle_ = device_handle(device);
  check_cuda(CudaDriver::get().p_cuDevicePrimaryCtxRetain(&context_, handle_),
             "cuDevicePrimaryCtxRetain");
}

CurrentContext::CurrentContext(CUcontext context) {
  check_cuda(CudaDriver::get().p_cuCtxPushCurrent(context), "cuCtxPushCurrent");
  CudaDriver::get().p_cuThreadExchangeStreamCaptureMode(&mode_);
}

CurrentContext::~CurrentContext() {
  CUcontext context = nullptr;
  CudaDriver::get().p_cuThreadExchangeStreamCaptureMode(&mode_);
  CudaDriver::get().p_cuCtxPopCurrent(&context);
}

void refuse_capture(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check_cuda(CudaDriver::get().p_cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  if (status != CU_STREAM_CAPTURE_STATUS_NONE) {
    throw Unavailable("the stream is being captured into a graph");
  }
}

}  // namespace mk
#endif
