// The rest of the made-up libcuda.so.1 (tests/kv/fake_cuda_driver.cc): memory of GPUs, which is a
// mapping of this process that the fake libibverbs refuses to pin, and its export as dma-bufs.
#include <cuda.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kv/fake_cuda_driver.h"

extern "C" FakeDriver fake_driver;

namespace {

struct Export {
  uint64_t begin, num_bytes;
};

// By name: what a test sets, and what it counts.
std::map<std::string, int64_t> values;
std::map<ino_t, Export> exports;  // by the file that stands for a dma-buf
uint64_t last_id = 0;
std::vector<std::pair<CUhostFn, void*>> host_functions;  // of streams that have not arrived there

ino_t inode_of(int fd) {
  struct stat status{};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

bool is_coherent() { return values["host_page_tables"] != 0; }

}  // namespace

extern "C" {

// Without memory; `active_device`: -1 for a program that has no context.
void fake_cuda_reset(int active_device) {
  for (const FakeAllocation& a : fake_driver.allocations) {
    munmap(reinterpret_cast<void*>(a.begin), a.end - a.begin);
  }
  fake_driver = {};
  fake_driver.is_initialized = active_device >= 0;
  fake_driver.active_device = active_device;
  exports.clear();
  // refuse_flags: an export with any, as where memory is not coherent. refuse_whole: one of several
  // mappings. refuse_all, sync_memops_fails, set_flags_fails: the errors of these.
  values = {{"dmabuf_supported", 1}, {"writes_ordering", 0}, {"flush_options", 1}};
}

void fake_cuda_set(const char* name, int64_t value) { values[name] = value; }
int64_t fake_cuda_get(const char* name) {
  if (!std::strcmp(name, "num_retained")) return fake_driver.num_retained;
  if (!std::strcmp(name, "has_context")) return fake_driver.current != nullptr;
  if (!std::strcmp(name, "is_initialized")) return fake_driver.is_initialized;
  return values[name];
}

// Mappings of these sizes, one after another, of pageable host memory where a size is negative.
uint64_t fake_cuda_allocate(int device, const int64_t* sizes, int count, int is_virtual) {
  int64_t total = 0;
  for (int i = 0; i < count; ++i) total += std::abs(sizes[i]);
  void* const start =
      mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto at = reinterpret_cast<uint64_t>(start);
  for (int i = 0; i < count; ++i) {
    const uint64_t end = at + std::abs(sizes[i]);
    if (sizes[i] > 0) {
      fake_driver.allocations.push_back(
          {at, end, CU_MEMORYTYPE_DEVICE, device, 0, ++last_id, is_virtual != 0});
    }
    at = end;
  }
  return reinterpret_cast<uint64_t>(start);
}

// Frees the allocation and gives its address out again, as caching allocators do.
void fake_cuda_reallocate(uint64_t address) {
  for (FakeAllocation& a : fake_driver.allocations) {
    if (a.begin == address) a.id = ++last_id;
  }
}

int fake_cuda_is_memory(uint64_t address) { return fake_driver.find(address).end != 0; }

uint64_t fake_cuda_find_dmabuf(int fd, uint64_t* num_bytes) {
  const auto found = exports.find(inode_of(fd));
  if (found == exports.end()) return 0;
  *num_bytes = found->second.num_bytes;
  return found->second.begin;
}

CUresult cuLaunchHostFunc(CUstream, CUhostFn function, void* data) {
  if (!fake_driver.current) return CUDA_ERROR_INVALID_CONTEXT;
  return host_functions.emplace_back(function, data), CUDA_SUCCESS;
}
void fake_cuda_arrive() {
  for (const auto& [function, data] : std::exchange(host_functions, {})) function(data);
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (!fake_driver.is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (device < kFirstHandle) return CUDA_ERROR_INVALID_DEVICE;
  const std::map<int, const char*> names = {
      {CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, "dmabuf_supported"},
      {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, "host_page_tables"},
      {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, "writes_ordering"},
      {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, "flush_options"}};
  const auto name = names.find(attribute);
  if (name == names.end()) return CUDA_ERROR_INVALID_VALUE;
  return *value = static_cast<int>(values[name->second]), CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  const FakeAllocation found = fake_driver.find(address);
  if (!fake_driver.current || !found.end || attribute != CU_POINTER_ATTRIBUTE_BUFFER_ID) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return *static_cast<unsigned long long*>(data) = found.id, CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                               CUdeviceptr address) {
  ++values["num_sync_memops"];
  const FakeAllocation found = fake_driver.find(address);
  if (!found.end || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ||
      *static_cast<const unsigned*>(value) != 1) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return found.is_virtual ? CUDA_ERROR_NOT_SUPPORTED
                          : static_cast<CUresult>(values["sync_memops_fails"]);
}

CUresult cuCtxGetFlags(unsigned* flags) {
  if (!fake_driver.current) return CUDA_ERROR_INVALID_CONTEXT;
  return *flags = static_cast<unsigned>(values["context_flags"]), CUDA_SUCCESS;
}
CUresult cuCtxSetFlags(unsigned flags) {
  if (!fake_driver.current) return CUDA_ERROR_INVALID_CONTEXT;
  if (values["set_flags_fails"]) return static_cast<CUresult>(values["set_flags_fails"]);
  return values["context_flags"] = flags, CUDA_SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget,
                                    CUflushGPUDirectRDMAWritesScope) {
  if (!fake_driver.current) return CUDA_ERROR_INVALID_CONTEXT;
  ++values["num_flushes"];
  return static_cast<CUresult>(values["flush_fails"]);
}

CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address, size_t num_bytes,
                                       CUmemRangeHandleType type, unsigned long long flags) {
  ++values["num_exports_tried"];
  values["last_flags"] = static_cast<int64_t>(flags);
  const uint64_t page = sysconf(_SC_PAGESIZE);
  const FakeAllocation first = fake_driver.find(address);
  const FakeAllocation last = fake_driver.find(address + num_bytes - 1);
  if (!fake_driver.current || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || !first.end ||
      !last.end || address % page != 0 || num_bytes % page != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (flags != 0 && !is_coherent()) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags != 0 && values["refuse_flags"]) return CUDA_ERROR_NOT_SUPPORTED;
  if (first.begin != last.begin && values["refuse_whole"]) return CUDA_ERROR_INVALID_VALUE;
  if (values["refuse_all"]) return static_cast<CUresult>(values["refuse_all"]);
  const int fd = memfd_create("dmabuf", MFD_CLOEXEC);
  exports[inode_of(fd)] = {address, num_bytes};
  *static_cast<int*>(handle) = fd;
  return ++values["num_exports"], CUDA_SUCCESS;
}

}  // extern "C"
