#include "transfer/gpu/gpu_fence.h"

#include <exception>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/gpu/cuda_calls.h"

namespace mk::transfer {

#if MK_HAVE_CUDA_H
namespace {

// The first GPU in use by this process.
int device_in_use() {
  int count = 0;
  if (cuda_is_initialized()) {
    check_cuda(CudaDriver::get().p_cuDeviceGetCount(&count), "cuDeviceGetCount");
  }
  for (int i = 0; i < count; ++i) {
    unsigned flags = 0;
    int is_active = 0;
    CudaDriver::get().p_cuDevicePrimaryCtxGetState(device_handle(i), &flags, &is_active);
    if (is_active) return i;
  }
  throw Unavailable("after: no GPU is in use in this process");
}

}  // namespace

struct GpuFence::Driver {
  explicit Driver(int device) : context(device) {}
  ~Driver() {
    try {
      const CurrentContext current(context);
      if (event) CudaCopy::get().p_cuEventDestroy(event);
      if (stream) CudaCopy::get().p_cuStreamDestroy(stream);
    } catch (const std::exception&) {
      // The process is exiting and the driver is already gone.
    }
  }
  void record(CUstream behind) {
    check_cuda(CudaCopy::get().p_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    check_cuda(CudaCopy::get().p_cuEventRecord(event, behind), "cuEventRecord");
  }

  const PrimaryContext context;
  CUstream stream = nullptr;  // ours, for a fence behind an event
  CUevent event = nullptr;
};

std::shared_ptr<GpuFence> GpuFence::behind_stream(uint64_t stream, int device) {
  auto driver = std::make_unique<Driver>(device);
  const CurrentContext current(driver->context);
  const auto handle = reinterpret_cast<CUstream>(stream);
  refuse_capture(handle);
  driver->record(handle);
  return std::shared_ptr<GpuFence>(new GpuFence(std::move(driver)));
}

std::shared_ptr<GpuFence> GpuFence::behind_event(uint64_t event, int device) {
  auto driver = std::make_unique<Driver>(device >= 0 ? device : device_in_use());
  const CurrentContext current(driver->context);
  check_cuda(CudaCopy::get().p_cuStreamCreate(&driver->stream, CU_STREAM_NON_BLOCKING),
             "cuStreamCreate");
  check_cuda(CudaCopy::get().p_cuStreamWaitEvent(driver->stream, reinterpret_cast<CUevent>(event),
                                                 CU_EVENT_WAIT_DEFAULT),
             "cuStreamWaitEvent");
  driver->record(driver->stream);
  return std::shared_ptr<GpuFence>(new GpuFence(std::move(driver)));
}

bool GpuFence::passed() {
  if (passed_) return true;
  try {
    const CurrentContext current(driver_->context);
    const CUresult result = CudaCopy::get().p_cuEventQuery(driver_->event);
    if (result == CUDA_ERROR_NOT_READY) return false;
    check_cuda(result, "cuEventQuery");
  } catch (const CudaError& error) {
    throw GpuFailure(error.what());
  }
  return passed_ = true;
}

#else

struct GpuFence::Driver {};
std::shared_ptr<GpuFence> GpuFence::behind_stream(uint64_t, int) {
  throw Unavailable("after: built without cuda.h");
}
std::shared_ptr<GpuFence> GpuFence::behind_event(uint64_t, int) {
  throw Unavailable("after: built without cuda.h");
}
bool GpuFence::passed() { return true; }

#endif

GpuFence::GpuFence(std::unique_ptr<Driver> driver) : driver_(std::move(driver)) {}
GpuFence::~GpuFence() = default;

}  // namespace mk::transfer
