#include "common/cuda_context.h"

#if MK_HAVE_CUDA_H
#include "common/check.h"

namespace mk {

void check_cuda(CUresult result, const char* function) {
  if (result != CUDA_SUCCESS) {
    throw CudaError(concat("CUDA: ", function, ": ", cuda_error_name(result)));
  }
}

PrimaryContext::PrimaryContext(int device) : device_(device) {
  check_cuda(CudaDriver::get().p_cuDevicePrimaryCtxRetain(&context_, device),
             "cuDevicePrimaryCtxRetain");
}

CurrentContext::CurrentContext(const PrimaryContext& context) {
  check_cuda(CudaDriver::get().p_cuCtxPushCurrent(context.get()), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
  CUcontext context = nullptr;
  CudaDriver::get().p_cuCtxPopCurrent(&context);
}

}  // namespace mk
#endif
