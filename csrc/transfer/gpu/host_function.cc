#include "transfer/gpu/host_function.h"

#include "common/check.h"
#include "transfer/gpu/cuda_calls.h"

namespace mk::transfer {

#if MK_HAVE_CUDA_H
namespace {

constexpr uint64_t kLastDefaultStream = 2;  // CU_STREAM_PER_THREAD

CUcontext context_of(uint64_t stream) {
  CUcontext context = nullptr;
  if (!cuda_is_initialized()) throw Unavailable("no GPU is in use in this process");
  if (stream > kLastDefaultStream) {
    check_cuda(
        CudaHostFunction::get().p_cuStreamGetCtx(reinterpret_cast<CUstream>(stream), &context),
        "cuStreamGetCtx");
  } else {
    check_cuda(CudaDriver::get().p_cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  }
  if (!context) throw Unavailable("no GPU is current in this thread, whose default stream it is");
  return context;
}

}  // namespace

void call_in_stream(uint64_t stream, void (*function)(void*), void* data) {
  const auto handle = reinterpret_cast<CUstream>(stream);
  const CurrentContext current(context_of(stream));
  refuse_capture(handle);
  check_cuda(CudaHostFunction::get().p_cuLaunchHostFunc(handle, function, data),
             "cuLaunchHostFunc");
}

#else

void call_in_stream(uint64_t, void (*)(void*), void*) { throw Unavailable("built without cuda.h"); }

#endif

}  // namespace mk::transfer
