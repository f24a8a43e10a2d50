#include "transfer/gpu/gpu_mapping.h"

#include <cstring>
#include <exception>

#include "common/check.h"
#include "transfer/gpu/cuda_calls.h"

namespace mk::transfer {

#if MK_HAVE_CUDA_H
namespace {

static_assert(sizeof(CUipcMemHandle) == sizeof(GpuEntry::handle));
static_assert(sizeof(CUuuid) == sizeof(GpuEntry::gpu));

CUresult fill_in(GpuEntry& entry, const Region& region) {
  const PrimaryContext context(region.device);
  const CurrentContext current(context);
  const auto& driver = CudaIpc::get();
  CUdeviceptr base = 0;
  size_t num_bytes = 0;
  CUresult result = driver.p_cuMemGetAddressRange(&base, &num_bytes, region.range.address);
  if (result != CUDA_SUCCESS) return result;
  entry.offset = region.range.address - base;
  if (region.range.num_bytes > num_bytes - entry.offset) return CUDA_ERROR_INVALID_VALUE;
  CUuuid gpu{};
  result = driver.p_cuDeviceGetUuid(&gpu, context.handle());
  if (result != CUDA_SUCCESS) return result;
  CUipcMemHandle handle{};
  result = driver.p_cuIpcGetMemHandle(&handle, base);
  std::memcpy(entry.gpu.data(), &gpu, sizeof(gpu));
  std::memcpy(entry.handle.data(), &handle, sizeof(handle));
  return result;
}

// -1: not visible here.
int find_gpu(const std::array<unsigned char, 16>& uuid) {
  int count = 0;
  check_cuda(CudaDriver::get().p_cuDeviceGetCount(&count), "cuDeviceGetCount");
  for (int device = 0; device < count; ++device) {
    CUuuid gpu{};
    check_cuda(CudaIpc::get().p_cuDeviceGetUuid(&gpu, device_handle(device)), "cuDeviceGetUuid");
    if (std::memcmp(&gpu, uuid.data(), sizeof(gpu)) == 0) return device;
  }
  return -1;
}

}  // namespace

GpuEntry export_region(const Region& region) noexcept {
  GpuEntry entry{};
  entry.address = region.range.address;
  try {
    entry.error = fill_in(entry, region);
  } catch (const std::exception&) {
    entry.error = CUDA_ERROR_UNKNOWN;
  }
  return entry;
}

struct GpuMapping::Context {
  explicit Context(int device) : held(device) {}
  const PrimaryContext held;
};

GpuMapping::~GpuMapping() {
  if (base_ == 0) return;
  try {
    const CurrentContext current(context_->held);
    CudaIpc::get().p_cuIpcCloseMemHandle(base_);
  } catch (const std::exception&) {
    // The process is exiting and the driver is already gone.
  }
}

void GpuMapping::try_open() {
  if (entry_.error != CUDA_SUCCESS) {
    why_not_ = concat("the driver does not let other processes open it (cuIpcGetMemHandle: ",
                      cuda_error_name(static_cast<CUresult>(entry_.error)), ")");
    return;
  }
  if (!cuda_is_initialized()) {
    // The bytes can go another way, so it is not worth a context. If it uses CUDA later, they can
    // go by this one.
    is_tried_ = false;
    why_not_ = "this process does not use CUDA";
    return;
  }
  device_ = find_gpu(entry_.gpu);
  if (device_ < 0) {
    why_not_ = "its GPU is not visible in this process";
    return;
  }
  context_ = std::make_unique<Context>(device_);
  const CurrentContext current(context_->held);
  CUipcMemHandle handle{};
  std::memcpy(&handle, entry_.handle.data(), sizeof(handle));
  CUdeviceptr base = 0;
  check_cuda(CudaIpc::get().p_cuIpcOpenMemHandle(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
             "cuIpcOpenMemHandle");
  base_ = base;
}

#else

GpuEntry export_region(const Region& region) noexcept {
  GpuEntry entry{};
  entry.address = region.range.address;
  return entry;
}
struct GpuMapping::Context {};
GpuMapping::~GpuMapping() = default;
void GpuMapping::try_open() { why_not_ = "built without cuda.h"; }

#endif

GpuMapping::GpuMapping(const GpuEntry& entry) : entry_(entry) {}

bool GpuMapping::open() {
  if (!is_tried_) {
    is_tried_ = true;
    try {
      try_open();
    } catch (const std::exception& error) {
      why_not_ = error.what();
    }
  }
  return base_ != 0;
}

}  // namespace mk::transfer
