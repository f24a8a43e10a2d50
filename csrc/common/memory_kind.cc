#include "common/memory_kind.h"

#include "common/check.h"
#include "common/cuda_driver.h"

namespace mk {
namespace {

constexpr uint64_t kAll = ~uint64_t{0};

#if MK_HAVE_CUDA_H

void check(CUresult result, const char* function) {
  if (result != CUDA_SUCCESS) {
    throw CudaError(concat("CUDA: ", function, ": ", cuda_error_name(result)));
  }
}

// Makes the context of the first GPU in use current and returns the GPU; -1 if none is in use. The
// runtime (and so torch) has one context per GPU, the primary one.
int push_primary_context(const CudaDriver& driver) {
  int num_devices = 0;
  if (driver.p_cuDeviceGetCount(&num_devices) != CUDA_SUCCESS) return -1;
  for (int i = 0; i < num_devices; ++i) {
    CUdevice device = 0;
    unsigned flags = 0;
    int is_active = 0;
    check(driver.p_cuDeviceGet(&device, i), "cuDeviceGet");
    check(driver.p_cuDevicePrimaryCtxGetState(device, &flags, &is_active),
          "cuDevicePrimaryCtxGetState");
    if (!is_active) continue;
    CUcontext context = nullptr;
    check(driver.p_cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    const CUresult pushed = driver.p_cuCtxPushCurrent(context);
    if (pushed != CUDA_SUCCESS) driver.p_cuDevicePrimaryCtxRelease(device);
    check(pushed, "cuCtxPushCurrent");
    return device;
  }
  return -1;
}

#endif

}  // namespace

MemoryMap::MemoryMap() {
#if MK_HAVE_CUDA_H
  if (!cuda_driver_is_loaded() || !CudaDriver::reason().empty()) return;
  const CudaDriver& driver = CudaDriver::get();
  CUcontext current = nullptr;
  if (driver.p_cuCtxGetCurrent(&current) != CUDA_SUCCESS) return;  // cuInit was not called
  if (!current) pushed_device_ = push_primary_context(driver);
  has_context_ = current || pushed_device_ >= 0;
#endif
}

MemoryMap::~MemoryMap() {
#if MK_HAVE_CUDA_H
  if (pushed_device_ < 0) return;
  CUcontext context = nullptr;
  CudaDriver::get().p_cuCtxPopCurrent(&context);
  CudaDriver::get().p_cuDevicePrimaryCtxRelease(pushed_device_);
#endif
}

MemoryRange MemoryMap::find(uint64_t address) {
  if (!has_context_) return {MemoryKind::kPageable, -1, 0, 0, kAll};
  const auto known = known_.upper_bound(address);
  if (known != known_.end() && known->second.contains(address)) return known->second;
  const MemoryRange range = ask(address);
  if (range.kind != MemoryKind::kPageable) known_[range.end] = range;
  return range;
}

MemoryRange MemoryMap::ask(uint64_t address) const {
  MemoryRange range{MemoryKind::kPageable, -1, 0, address, address + 1};
#if MK_HAVE_CUDA_H
  unsigned type = 0;
  int device = -1;
  CUdeviceptr begin = 0, device_address = 0;
  size_t num_bytes = 0;
  CUpointer_attribute attributes[] = {
      CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
      CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
      CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&type, &device, &device_address, &begin, &num_bytes};
  const CUresult asked = CudaDriver::get().p_cuPointerGetAttributes(5, attributes, values, address);
  if (asked == CUDA_ERROR_INVALID_VALUE) return range;  // from drivers that do not know the address
  check(asked, "cuPointerGetAttributes");
  const bool is_device = type == CU_MEMORYTYPE_DEVICE;
  // A GPU cannot reach host memory without a device address: treat it as pageable.
  if (!is_device && !(type == CU_MEMORYTYPE_HOST && device_address != 0)) return range;
  range.kind = is_device ? MemoryKind::kDevice : MemoryKind::kPinned;
  if (is_device) range.device = device;
  if (!is_device) range.device_offset = device_address - address;
  range.begin = begin;
  range.end = begin + num_bytes;
  if (!range.contains(address)) range.begin = address, range.end = address + 1;  // unknown extent
#endif
  return range;
}

std::optional<uint64_t> device_offset_of(MemoryMap& map, uint64_t address, uint64_t num_bytes) {
  const MemoryRange first = map.find(address);
  MemoryRange range = first;
  const uint64_t end = address + num_bytes;
  // Several registrations may be adjacent.
  while (range.kind == MemoryKind::kPinned && range.is_like(first) && range.end < end) {
    // If the driver does not know the extent, it is not queried for each byte.
    range = map.find(range.end - range.begin > 1 ? range.end : end - 1);
  }
  if (range.kind != MemoryKind::kPinned || !range.is_like(first)) return std::nullopt;
  return first.device_offset;
}

}  // namespace mk
