#include "transfer/gpu/gpu_stream.h"

#include <algorithm>
#include <deque>
#include <map>
#include <string>

#include "common/check.h"
#include "common/stream_copy.h"
#include "transfer/gpu/cuda_calls.h"

namespace mk::transfer {

#if MK_HAVE_CUDA_H
struct GpuStream::Driver {
  explicit Driver(int device) : context(device) {
    const CurrentContext current(context);
    check_cuda(CudaCopy::get().p_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~Driver() {
    try {
      const CurrentContext current(context);
      for (const CUevent event : under_way) CudaCopy::get().p_cuEventDestroy(event);
      for (const CUevent event : free) CudaCopy::get().p_cuEventDestroy(event);
      CudaCopy::get().p_cuStreamDestroy(stream);
    } catch (const std::exception&) {
      // The process is exiting and the driver is already gone.
    }
  }

  // Lets GPUs copy to each other directly, over NVLink or PCIe, where the machine supports that.
  void reach(int other) {
    if (other < 0 || other == context.device() || reached.count(other)) return;
    int can = 0;
    const PrimaryContext& there = reached.try_emplace(other, other).first->second;
    if (CudaCopy::get().p_cuDeviceCanAccessPeer(&can, context.handle(), there.handle()) !=
            CUDA_SUCCESS ||
        !can) {
      return;
    }
    CudaCopy::get().p_cuCtxEnablePeerAccess(there.get(), 0);  // fails if already enabled
  }

  void prepare() {
    if (!free.empty()) return;
    CUevent event = nullptr;
    check_cuda(CudaCopy::get().p_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    free.push_back(event);
  }

  void record() {
    const CUevent event = free.back();
    check_cuda(CudaCopy::get().p_cuEventRecord(event, stream), "cuEventRecord");
    free.pop_back();
    under_way.push_back(event);
  }

  const PrimaryContext context;
  CUstream stream = nullptr;
  std::deque<CUevent> under_way;  // one per batch
  std::vector<CUevent> free;
  std::map<int, PrimaryContext> reached;
};

std::string missing_gpu_driver() { return CudaDriver::reason(); }

GpuStream::GpuStream(int device) : driver_(std::make_unique<Driver>(device)) {}
GpuStream::~GpuStream() = default;

uint64_t GpuStream::copy(const std::vector<GpuCopy>& copies) {
  const CurrentContext current(driver_->context);
  driver_->prepare();
  try {
    begin(copies);
    driver_->record();
  } catch (const CudaError&) {
    remember();
    throw;
  }
  return ++num_begun_;
}

// Some copies may have begun: records an event behind them to wait for.
void GpuStream::remember() {
  try {
    driver_->record();
    ++num_begun_;
  } catch (const CudaError&) {
    is_lost_ = true;
  }
}

void GpuStream::begin(const std::vector<GpuCopy>& copies) {
  CopyList list;
  bool page_locked = true;
  for (const GpuCopy& copy : copies) {
    driver_->reach(copy.other);
    page_locked &= copy.other != kAnyHost;
    list.add(copy.dst, copy.src, copy.num_bytes);
  }
  list.queue(page_locked, driver_->stream);
}

bool GpuStream::is_over(uint64_t number) {
  if (num_over_ >= number) return true;
  if (is_lost_) throw CudaError("CUDA: copies whose end the driver does not tell");
  const CurrentContext current(driver_->context);
  while (num_over_ < number) {
    const CUresult result = CudaCopy::get().p_cuEventQuery(driver_->under_way.front());
    if (result == CUDA_ERROR_NOT_READY) return false;
    check_cuda(result, "cuEventQuery");
    driver_->free.push_back(driver_->under_way.front());
    driver_->under_way.pop_front();
    ++num_over_;
  }
  return true;
}

struct PinnedMemory::Context {
  explicit Context(int device) : held(device) {}
  const PrimaryContext held;
};

PinnedMemory::PinnedMemory(uint64_t num_bytes, int device)
    : context_(std::make_unique<Context>(device)) {
  const CurrentContext current(context_->held);
  void* data = nullptr;
  check_cuda(CudaCopy::get().p_cuMemHostAlloc(&data, num_bytes, CU_MEMHOSTALLOC_PORTABLE),
             "cuMemHostAlloc");
  data_ = static_cast<char*>(data);
}

PinnedMemory::~PinnedMemory() {
  if (!data_) return;
  try {
    const CurrentContext current(context_->held);
    CudaCopy::get().p_cuMemFreeHost(data_);
  } catch (const std::exception&) {
    // As above.
  }
}

#else

std::string missing_gpu_driver() { return "built without cuda.h"; }

struct GpuStream::Driver {};
GpuStream::GpuStream(int) { throw Unavailable("built without cuda.h"); }
GpuStream::~GpuStream() = default;
uint64_t GpuStream::copy(const std::vector<GpuCopy>&) { return 0; }
bool GpuStream::is_over(uint64_t) { return true; }

struct PinnedMemory::Context {};
PinnedMemory::PinnedMemory(uint64_t, int) { throw Unavailable("built without cuda.h"); }
PinnedMemory::~PinnedMemory() = default;

#endif

}  // namespace mk::transfer
