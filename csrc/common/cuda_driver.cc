#include "common/cuda_driver.h"

#if MK_HAVE_CUDA_H
#include <link.h>

#include <atomic>

namespace mk {
namespace {

// The number of libraries that the loader has loaded so far.
unsigned long long num_loads() {
  unsigned long long loads = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* result) {
        *static_cast<unsigned long long*>(result) = info->dlpi_adds;
        return 1;  // the same for every library
      },
      &loads);
  return loads;
}

}  // namespace

// Looking up a library that is not loaded takes the loader 20 us of file accesses; the answer
// cannot change as long as nothing else is loaded.
bool cuda_driver_is_loaded() {
  static std::atomic<bool> is_loaded{false};
  static std::atomic<unsigned long long> loads_without{0};
  if (is_loaded.load(std::memory_order_relaxed)) return true;
  const unsigned long long loads = num_loads();
  if (loads == loads_without.load(std::memory_order_relaxed)) return false;
  if (dlopen(kCudaDriverName, RTLD_LAZY | RTLD_NOLOAD)) {  // holds it, so that this stays true
    is_loaded.store(true, std::memory_order_relaxed);
    return true;
  }
  loads_without.store(loads, std::memory_order_relaxed);
  return false;
}

bool cuda_is_initialized() {
  if (!cuda_driver_is_loaded() || !CudaDriver::reason().empty()) return false;
  CUcontext current = nullptr;
  return CudaDriver::get().p_cuCtxGetCurrent(&current) == CUDA_SUCCESS;
}

}  // namespace mk
#endif
