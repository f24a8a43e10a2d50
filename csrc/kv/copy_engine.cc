#include "kv/copy_engine.h"

#include <vector>

#include "common/check.h"
#include "common/cuda_driver.h"

#if MK_HAVE_CUDA_H && CUDA_VERSION >= 12080
#define MK_HAVE_MEMCPY_BATCH 1
#include <cudaTypedefs.h>
#else
#define MK_HAVE_MEMCPY_BATCH 0
#endif

namespace mk::kv {

#if MK_HAVE_MEMCPY_BATCH
namespace {

// CUDA 13's header declares another signature under this name. The driver is asked for that of
// 12.8, which those of 13 still have, and which says where it failed.
using MemcpyBatch = PFN_cuMemcpyBatchAsync_v12080;
constexpr int kVersion = 12080;

struct Found {
  MemcpyBatch copy = nullptr;
  std::string missing;
};

Found find() {
  if (!CudaDriver::reason().empty()) return {nullptr, CudaDriver::reason()};
  if (!CudaProcAddress::reason().empty()) return {nullptr, CudaProcAddress::reason()};
  void* function = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  const CUresult result = CudaProcAddress::get().p_cuGetProcAddress(
      "cuMemcpyBatchAsync", &function, kVersion, CU_GET_PROC_ADDRESS_DEFAULT, &status);
  if (result != CUDA_SUCCESS || !function) {
    int version = 0;
    CudaDriver::get().p_cuDriverGetVersion(&version);
    return {nullptr, concat("cuMemcpyBatchAsync needs a driver of CUDA 12.8, this one is of ",
                            version / 1000, ".", version % 1000 / 10)};
  }
  return {reinterpret_cast<MemcpyBatch>(function), ""};
}

const Found& found() {
  static const Found result = find();
  return result;
}

// The arrays that the driver wants; it reads them before it returns.
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

}  // namespace

std::string copy_engine_missing() { return found().missing; }

void copy_by_engine(const CopyRange* ranges, int64_t num_ranges, bool any_order, void* stream) {
  if (!found().copy) throw Unavailable(concat("engine copy_engine: ", found().missing));
  const auto cuda_stream = static_cast<CUstream>(stream);
  MK_CHECK(cuda_stream && cuda_stream != CU_STREAM_LEGACY,
           "engine copy_engine: the current stream must not be the default one (use `with "
           "torch.cuda.stream(...)`), got the default stream");
  if (num_ranges == 0) return;
  Arrays arrays(ranges, num_ranges);
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder =
      any_order ? CU_MEMCPY_SRC_ACCESS_ORDER_ANY : CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  size_t first = 0, failed = ~size_t{0};
  const CUresult result =
      found().copy(arrays.dst.data(), arrays.src.data(), arrays.num_bytes.data(),
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
