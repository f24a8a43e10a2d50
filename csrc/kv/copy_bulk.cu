#include "kv/copy_bulk.h"

#include <algorithm>

#include "common/cuda_check.h"
#include "common/cuda_device.h"
#include "kv/bulk_instructions.cuh"
#include "kv/copy_bulk_kernel.cuh"

namespace mk::kv {
namespace {

void check_device() {
  int device = 0, major = 0, minor = 0;
  MK_CUDA(cudaGetDevice(&device));
  MK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major < 9) {
    throw Unavailable(
        concat("engine tma: it needs a GPU of compute capability 9.0, this one is of ", major, ".",
               minor));
  }
}

}  // namespace

void launch_copy_bulk(const CopyBlocksParams& p, BadId* bad, int max_sms, void* stream) {
  check_device();
  if (p.num_runs() == 0 || p.run_bytes == 0) return;
  MK_CHECK(p.alignment() >= kBulkAlignment,
           "engine tma must be given runs at multiples of 16 bytes, got some at multiples of ",
           p.alignment(), " (engine cuda takes these)");
  const BulkRing ring = make_ring(p.run_bytes, p.num_runs());
  const auto kernel = copy_bulk_kernel<BulkInstructions>;
  const auto shared_bytes = static_cast<int>(int64_t{ring.num_stages} * ring.stage_bytes);
  MK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes));
  const int most = max_sms > 0 ? max_sms : num_sms();
  const auto grid = static_cast<unsigned>(std::min<int64_t>(ring.num_chunks, most));
  kernel<<<grid, 32, shared_bytes, static_cast<cudaStream_t>(stream)>>>(p, ring, bad);
  MK_CUDA(cudaGetLastError());
}

}  // namespace mk::kv
