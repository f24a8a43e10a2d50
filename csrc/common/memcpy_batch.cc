#include "common/memcpy_batch.h"

#if MK_HAVE_MEMCPY_BATCH
#include "common/check.h"

namespace mk {
namespace {

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

}  // namespace

MemcpyBatch memcpy_batch() { return found().copy; }
const std::string& memcpy_batch_missing() { return found().missing; }

}  // namespace mk
#endif
