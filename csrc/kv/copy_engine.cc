#include "kv/copy_engine.h"

#include <vector>

#include "common/check.h"
#include "common/cuda_driver.h"
#include "common/memcpy_batch.h"

namespace mk::kv {

#if MK_HAVE_MEMCPY_BATCH
namespace {

// A separate table: other uses of the driver do not need this function.
#define MK_STREAM_FUNCTIONS(X) X(cuStreamGetCtx)
MK_DYNLIB(StreamFunctions, kCudaDriverName, MK_STREAM_FUNCTIONS)

// The arrays for the driver, which reads them before it returns.
struct Arrays {
  std::vector<CUdeviceptr> src, dst;
  std::vector<size_t> num_bytes;

  Arrays(const CopyRange* ranges, int64_t n) : src(n), dst(n), num_bytes(n) {
    for (int64_t i = 0; i < n; ++i) {
      src[i] = reinterpret_cast<CUdeviceptr>(ranges[i].src);
      dst[i] = reinterpret_cast<CUdeviceptr>(ranges[i].dst);
      num_bytes[i] = static_cast<size_t>(ranges[i].num_bytes);
    }
  }
};

void check(CUresult result, const char* function) {
  if (result == CUDA_SUCCESS) return;
  throw CudaError(concat("CUDA: ", function, ": ", cuda_error_name(result)));
}

// Makes the stream's context current for a thread that has none because it has not called the
// runtime yet, like a Python thread that only set torch's stream. The runtime does this by itself.
class ContextOfStream {
 public:
  explicit ContextOfStream(CUstream stream) {
    const CudaDriver& driver = CudaDriver::get();
    CUcontext context = nullptr;
    check(driver.p_cuCtxGetCurrent(&context), "cuCtxGetCurrent");
    if (context) return;
    check(StreamFunctions::get().p_cuStreamGetCtx(stream, &context), "cuStreamGetCtx");
    check(driver.p_cuCtxPushCurrent(context), "cuCtxPushCurrent");
    is_pushed_ = true;
  }
  ~ContextOfStream() {
    CUcontext context = nullptr;
    if (is_pushed_) CudaDriver::get().p_cuCtxPopCurrent(&context);
  }
  ContextOfStream(const ContextOfStream&) = delete;
  ContextOfStream& operator=(const ContextOfStream&) = delete;

 private:
  bool is_pushed_ = false;
};

}  // namespace

std::string copy_engine_missing() { return memcpy_batch_missing(); }

void copy_by_engine(const CopyRange* ranges, int64_t num_ranges, bool any_order, void* stream) {
  if (!memcpy_batch()) {
    throw Unavailable(concat("engine copy_engine: ", memcpy_batch_missing()));
  }
  const auto cuda_stream = static_cast<CUstream>(stream);
  MK_CHECK(cuda_stream && cuda_stream != CU_STREAM_LEGACY,
           "engine copy_engine: the current stream must not be the default one (use `with "
           "torch.cuda.stream(...)`), got the default stream");
  if (num_ranges == 0) return;
  const ContextOfStream context(cuda_stream);
  Arrays arrays(ranges, num_ranges);
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder =
      any_order ? CU_MEMCPY_SRC_ACCESS_ORDER_ANY : CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  size_t first = 0, failed = ~size_t{0};
  const CUresult result =
      memcpy_batch()(arrays.dst.data(), arrays.src.data(), arrays.num_bytes.data(),
                     static_cast<size_t>(num_ranges), &attributes, &first, 1, &failed, cuda_stream);
  if (result == CUDA_SUCCESS) return;
  std::string where;
  if (failed < static_cast<size_t>(num_ranges)) {
    const CopyRange& range = ranges[failed];
    where = concat(" (", range.num_bytes, " bytes from ", static_cast<const void*>(range.src),
                   " to ", static_cast<const void*>(range.dst), ")");
  }
  throw CudaError(concat("CUDA: cuMemcpyBatchAsync: ", cuda_error_name(result), where));
}

#else

std::string copy_engine_missing() { return "_ops.so was built without the headers of CUDA 12.8"; }

void copy_by_engine(const CopyRange*, int64_t, bool, void*) {
  throw Unavailable(concat("engine copy_engine: ", copy_engine_missing()));
}

#endif

}  // namespace mk::kv
