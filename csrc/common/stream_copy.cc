#include "common/stream_copy.h"

#include "common/check.h"
#include "common/cuda_context.h"
#include "common/memcpy_batch.h"

namespace mk {

#if MK_HAVE_CUDA_H
namespace {

// clang-format off
#define MK_CUDA_STREAM_COPY_FUNCTIONS(X) X(cuMemcpyAsync) X(cuStreamSynchronize)
// clang-format on
MK_DYNLIB(CudaStreamCopy, kCudaDriverName, MK_CUDA_STREAM_COPY_FUNCTIONS)

void wait_for(CUstream stream) {
  check_cuda(CudaStreamCopy::get().p_cuStreamSynchronize(stream), "cuStreamSynchronize");
}

}  // namespace

void CopyList::add(uint64_t dst, uint64_t src, uint64_t num_bytes) {
  dst_.push_back(dst);
  src_.push_back(src);
  num_bytes_.push_back(num_bytes);
}

void CopyList::queue(bool page_locked, CUstream stream) const {
  // The driver stages memory that is not page-locked, one copy at a time.
  if (dst_.size() > 1 && page_locked && queue_at_once(stream)) return;
  for (size_t i = 0; i < dst_.size(); ++i) {
    check_cuda(CudaStreamCopy::get().p_cuMemcpyAsync(dst_[i], src_[i], num_bytes_[i], stream),
               "cuMemcpyAsync");
  }
}

// False if the driver has no such call, or rejects these copies: then it has queued none.
bool CopyList::queue_at_once(CUstream stream) const {
#if MK_HAVE_MEMCPY_BATCH
  if (!memcpy_batch() || !stream || stream == CU_STREAM_LEGACY) return false;
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  size_t first = 0, failed = 0;
  // The driver reads the arrays before it returns, and does not modify them.
  const CUresult result = memcpy_batch()(
      const_cast<CUdeviceptr*>(dst_.data()), const_cast<CUdeviceptr*>(src_.data()),
      const_cast<size_t*>(num_bytes_.data()), dst_.size(), &attributes, &first, 1, &failed, stream);
  if (result == CUDA_ERROR_NOT_SUPPORTED) return false;
  check_cuda(result, "cuMemcpyBatchAsync");
  return true;
#else
  return false;
#endif
}

void copy_in_stream(const std::vector<StreamCopy>& copies, bool page_locked, int device,
                    uint64_t stream) {
  if (copies.empty()) return;
  CopyList list;
  for (const StreamCopy& copy : copies) list.add(copy.dst, copy.src, copy.num_bytes);
  const PrimaryContext context(device);
  const CurrentContext current(context);
  const auto handle = reinterpret_cast<CUstream>(stream);
  refuse_capture(handle);
  try {
    list.queue(page_locked, handle);
  } catch (const CudaError&) {
    CudaStreamCopy::get().p_cuStreamSynchronize(handle);  // for copies in flight
    throw;
  }
  wait_for(handle);
}

void wait_for_stream(int device, uint64_t stream) {
  const PrimaryContext context(device);
  const CurrentContext current(context);
  const auto handle = reinterpret_cast<CUstream>(stream);
  refuse_capture(handle);
  wait_for(handle);
}

#else

void copy_in_stream(const std::vector<StreamCopy>&, bool, int, uint64_t) {
  throw Unavailable("built without cuda.h");
}

void wait_for_stream(int, uint64_t) { throw Unavailable("built without cuda.h"); }

#endif

}  // namespace mk
