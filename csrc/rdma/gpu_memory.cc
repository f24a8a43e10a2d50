#include "rdma/gpu_memory.h"

#include <unistd.h>

#include <algorithm>

#include "common/check.h"
#include "common/cuda_context.h"
#include "common/memory_kind.h"
#include "rdma/cuda_rdma.h"

namespace mk::rdma {

std::optional<GpuMemory> find_gpu_memory(Span span) {
  MemoryMap map;
  const MemoryRange first = map.find(span.address);
  if (first.kind != MemoryKind::kDevice) return std::nullopt;
  GpuMemory memory{first.device, {}};
  for (uint64_t at = span.address; at < span.end();) {
    const MemoryRange range = map.find(at);
    MK_CHECK(range.kind == MemoryKind::kDevice && range.device == first.device,
             "register: buffer must be memory of one GPU, got cuda:", first.device, " up to byte ",
             at - span.address, " of ", span.num_bytes, " and something else from there on");
    // For an allocation of unknown extent, MemoryMap returns that one byte.
    const bool known = range.end - range.begin > 1;
    const uint64_t end = known ? std::min(range.end, span.end()) : span.end();
    memory.mappings.push_back({at, end - at});
    at = end;
  }
  return memory;
}

#if MK_HAVE_CUDA_H
namespace {

int attribute(CUdevice_attribute attribute, CUdevice device) {
  int value = 0;
  check_cuda(CudaRdma::get().p_cuDeviceGetAttribute(&value, attribute, device),
             "cuDeviceGetAttribute");
  return value;
}

Span whole_pages(Span span) {
  const uint64_t page = sysconf(_SC_PAGESIZE);
  const uint64_t begin = span.address / page * page;
  return {begin, (span.end() + page - 1) / page * page - begin};
}

// A GPU with a coherent link to its CPU (Grace) exports through that link unless told otherwise,
// and a NIC on PCIe cannot reach it there. Other drivers reject the flag.
std::vector<unsigned long long> export_flags(CUdevice device) {
  const bool coherent =
      attribute(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, device) != 0;
  if (coherent) return {CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE, 0};
  return {0};
}

// Appends the export; returns the error's name if the driver refuses.
std::string export_one(Span span, const std::vector<unsigned long long>& flags,
                       std::vector<DmabufExport>* exports) {
  const Span pages = whole_pages(span);
  CUresult result = CUDA_SUCCESS;
  for (const unsigned long long flag : flags) {
    int fd = -1;
    result = CudaDmabuf::get().p_cuMemGetHandleForAddressRange(
        &fd, pages.address, pages.num_bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, flag);
    if (result != CUDA_SUCCESS) continue;
    exports->push_back({Fd(fd), pages});
    return "";
  }
  return concat("cuMemGetHandleForAddressRange: ", cuda_error_name(result));
}

}  // namespace

uint64_t allocation_id(uint64_t address) {
  if (!cuda_driver_is_loaded() || !CudaRdma::reason().empty()) return 0;
  unsigned long long id = 0;
  const MemoryMap context;
  const CUresult result = CudaRdma::get().p_cuPointerGetAttribute(
      &id, CU_POINTER_ATTRIBUTE_BUFFER_ID, static_cast<CUdeviceptr>(address));
  return result == CUDA_SUCCESS ? id : 0;
}

DmabufExports export_dmabufs(const GpuMemory& memory, Span span) {
  DmabufExports result;
  result.reason = CudaDmabuf::reason();
  if (!result.reason.empty()) return result;
  const PrimaryContext context(memory.device);
  const CurrentContext current(context);
  int supported = attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, context.handle());
  if (!supported) {
    result.reason = concat("cuda:", memory.device,
                           " does not export dma-bufs (the open kernel modules of driver 515 or "
                           "newer and Linux 5.12 do)");
    return result;
  }
  const auto flags = export_flags(context.handle());
  result.reason = export_one(span, flags, &result.exports);
  if (result.reason.empty() || memory.mappings.size() == 1) return result;
  for (const Span& mapping : memory.mappings) {
    result.reason = export_one(mapping, flags, &result.exports);
    if (result.reason.empty()) continue;
    result.exports.clear();
    return result;
  }
  return result;
}

std::string synchronize_copies(const GpuMemory& memory) {
  const PrimaryContext context(memory.device);
  const CurrentContext current(context);
  CUresult result = CUDA_SUCCESS;
  for (const Span& mapping : memory.mappings) {
    unsigned one = 1;
    result = CudaRdma::get().p_cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                                                     mapping.address);
    if (result != CUDA_SUCCESS) break;
  }
  if (result == CUDA_SUCCESS) return "";
  // Memory from the virtual memory management calls has no such attribute, but its context has.
  if (CudaContextFlags::reason().empty()) {
    unsigned flags = 0;
    const auto& context_flags = CudaContextFlags::get();
    result = context_flags.p_cuCtxGetFlags(&flags);
    if (result == CUDA_SUCCESS) result = context_flags.p_cuCtxSetFlags(flags | CU_CTX_SYNC_MEMOPS);
    if (result == CUDA_SUCCESS) return "";
  }
  return concat("cuPointerSetAttribute(SYNC_MEMOPS): ", cuda_error_name(result));
}

bool flush_writes(int device) {
  // Fails where CUDA is not initialized, and so no memory of a GPU can have been registered.
  const CUdevice handle = device_handle(device);
  const int ordering = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, handle);
  if (ordering >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER) return false;
  const int options = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, handle);
  if (!(options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST)) {
    throw Unavailable(concat("flush_writes: cuda:", device,
                             " neither orders the writes of NICs nor can the host flush them; read "
                             "a byte of them back over RDMA instead"));
  }
  const PrimaryContext context(device);
  const CurrentContext current(context);
  check_cuda(CudaFlush::get().p_cuFlushGPUDirectRDMAWrites(
                 CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                 CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
             "cuFlushGPUDirectRDMAWrites");
  return true;
}

#else

uint64_t allocation_id(uint64_t) { return 0; }
DmabufExports export_dmabufs(const GpuMemory&, Span) { return {{}, "built without cuda.h"}; }
std::string synchronize_copies(const GpuMemory&) { return "built without cuda.h"; }
bool flush_writes(int) { throw Unavailable("flush_writes: built without cuda.h"); }

#endif

}  // namespace mk::rdma
