// A libcuda.so.1 of a GPU whose memory is made up: enough of it for memory_kind.cc and
// copy_engine.cc to be run where there is no driver.
#include "kv/fake_cuda_driver.h"

#include <cuda.h>

#include <cstring>

#include "fake_cuda/pointer_attributes.h"

extern "C" {

FakeDriver fake_driver;

CUresult cuInit(unsigned) { return fake_driver.is_initialized = true, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = fake_driver.version, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) {
  if (!fake_driver.is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
  return *count = 2, CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!fake_driver.is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (ordinal < 0 || ordinal > 1) return CUDA_ERROR_INVALID_DEVICE;
  return *device = kFirstHandle + ordinal, CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
          : error == CUDA_ERROR_INVALID_DEVICE  ? "CUDA_ERROR_INVALID_DEVICE"
          : error == CUDA_ERROR_NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
          : error == CUDA_ERROR_NOT_SUPPORTED   ? "CUDA_ERROR_NOT_SUPPORTED"
                                                : nullptr;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  if (!fake_driver.is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
  return *context = static_cast<CUcontext>(fake_driver.current), CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
  fake_driver.stack.push_back(fake_driver.current);
  return fake_driver.current = context, CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (fake_driver.stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = static_cast<CUcontext>(fake_driver.current);
  fake_driver.current = fake_driver.stack.back();
  return fake_driver.stack.pop_back(), CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  if (!fake_driver.current) return CUDA_ERROR_INVALID_CONTEXT;
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
  return *context = reinterpret_cast<CUcontext>(&fake_driver), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return *flags = 0, *active = device - kFirstHandle == fake_driver.active_device, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!fake_driver.is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (device < kFirstHandle) return CUDA_ERROR_INVALID_DEVICE;
  ++fake_driver.num_retained;
  return *context = reinterpret_cast<CUcontext>(&fake_driver), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return --fake_driver.num_retained, CUDA_SUCCESS; }

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values,
                                CUdeviceptr address) {
  ++fake_driver.num_questions;
  if (!fake_driver.current) return CUDA_ERROR_INVALID_CONTEXT;
  const FakeAllocation found = fake_driver.find(address);
  const CUdeviceptr on_device = found.end ? address + found.device_offset : 0;
  return fake::answer_attributes(count, attributes, values,
                                 {found.type, found.device, on_device, found.begin, found.end});
}

static CUresult copy_batch(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                           CUmemcpyAttributes* attributes, size_t* firsts, size_t num_attributes,
                           size_t* failed, CUstream stream) {
  if (count == 0 || num_attributes != 1 || firsts[0] != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (!fake_driver.current) return CUDA_ERROR_INVALID_CONTEXT;
  if (fake_driver.fails) return *failed = count - 1, CUDA_ERROR_INVALID_VALUE;
  fake_driver.sizes.assign(sizes, sizes + count);
  fake_driver.order = attributes->srcAccessOrder;
  fake_driver.flags = attributes->flags;
  fake_driver.stream = stream;
  fake_driver.context = fake_driver.current;
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(reinterpret_cast<void*>(dsts[i]), reinterpret_cast<void*>(srcs[i]), sizes[i]);
  }
  return CUDA_SUCCESS;
}

// Under the version of CUDA 13 it has no `failed`: who asks for that one, and calls it so, fails.
// The CUDA runtime, which asks for every function in this way, finds none and reports no device.
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t,
                          CUdriverProcAddressQueryResult*) {
  const bool known = !std::strcmp(name, "cuMemcpyBatchAsync") && version == 12080;
  *function =
      known && fake_driver.version >= 12080 ? reinterpret_cast<void*>(&copy_batch) : nullptr;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
