#include "common/device_memory.h"

#include <exception>

#include "common/check.h"
#include "common/cuda_context.h"
#include "common/owner.h"

namespace mk {

#if MK_HAVE_CUDA_H
namespace {

// clang-format off
#define MK_CUDA_DEVICE_MEMORY_FUNCTIONS(X) \
  X(cuMemAlloc) X(cuMemFree) X(cuStreamCreate) X(cuStreamDestroy)
// clang-format on
MK_DYNLIB(CudaDeviceMemory, kCudaDriverName, MK_CUDA_DEVICE_MEMORY_FUNCTIONS)

}  // namespace

struct DeviceMemory::Held {
  explicit Held(int device) : context(device) {}
  ~Held() {
    try {
      const CurrentContext current(context);
      if (stream) CudaDeviceMemory::get().p_cuStreamDestroy(stream);
      if (allocation) CudaDeviceMemory::get().p_cuMemFree(allocation);
    } catch (const std::exception&) {
      // The process is exiting and the driver is already gone.
    }
  }
  const PrimaryContext context;
  CUdeviceptr allocation = 0;
  uint64_t address = 0;
  CUstream stream = nullptr;
  const Owner owner;
};

DeviceMemory::DeviceMemory(uint64_t num_bytes, uint64_t alignment, int device)
    : held_(std::make_unique<Held>(device)) {
  const CurrentContext current(held_->context);
  const CudaDeviceMemory& driver = CudaDeviceMemory::get();
  // The driver's alignment is undocumented; in practice it is 512 bytes, and 2 MiB for large sizes.
  check_cuda(driver.p_cuMemAlloc(&held_->allocation, num_bytes + alignment - 1), "cuMemAlloc");
  held_->address = (held_->allocation + alignment - 1) / alignment * alignment;
  check_cuda(driver.p_cuStreamCreate(&held_->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

DeviceMemory::~DeviceMemory() {
  // A forked child's driver state, including the context, belongs to its parent.
  if (held_ && held_->owner.forked()) held_.release();  // NOLINT: on purpose
}

uint64_t DeviceMemory::address() const { return held_->address; }
int DeviceMemory::device() const { return held_->context.device(); }
uint64_t DeviceMemory::stream() const { return reinterpret_cast<uint64_t>(held_->stream); }

#else

struct DeviceMemory::Held {};
DeviceMemory::DeviceMemory(uint64_t, uint64_t, int) { throw Unavailable("built without cuda.h"); }
DeviceMemory::~DeviceMemory() = default;
uint64_t DeviceMemory::address() const { return 0; }
int DeviceMemory::device() const { return -1; }
uint64_t DeviceMemory::stream() const { return 0; }

#endif

}  // namespace mk
