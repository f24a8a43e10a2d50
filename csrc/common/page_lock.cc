#include "common/page_lock.h"

#include <exception>

#include "common/check.h"
#include "common/cuda_context.h"
#include "common/owner.h"

namespace mk {

#if MK_HAVE_CUDA_H

#define MK_CUDA_PAGE_LOCK_FUNCTIONS(X) X(cuMemHostRegister) X(cuMemHostUnregister)
MK_DYNLIB(CudaPageLock, kCudaDriverName, MK_CUDA_PAGE_LOCK_FUNCTIONS)

struct PageLock::Held {
  Held(char* data, int device) : context(device), data(data) {}
  const PrimaryContext context;
  char* const data;
  const Owner owner;
};

PageLock::PageLock(char* data, uint64_t num_bytes, int device) {
  auto held = std::make_unique<Held>(data, device);
  const CurrentContext current(held->context);
  check_cuda(CudaPageLock::get().p_cuMemHostRegister(data, num_bytes, CU_MEMHOSTREGISTER_PORTABLE),
             "cuMemHostRegister");
  held_ = std::move(held);
}

PageLock::~PageLock() {
  if (!held_) return;
  if (held_->owner.forked()) {  // the driver belongs to the parent
    held_.release();
    return;
  }
  try {
    const CurrentContext current(held_->context);
    CudaPageLock::get().p_cuMemHostUnregister(held_->data);
  } catch (const std::exception&) {
    // The process is exiting and the driver is already gone.
  }
}

#else

struct PageLock::Held {};
PageLock::PageLock(char*, uint64_t, int) { throw Unavailable("built without cuda.h"); }
PageLock::~PageLock() = default;

#endif

}  // namespace mk
