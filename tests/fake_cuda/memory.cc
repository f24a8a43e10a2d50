// Pinned memory, and memory of GPUs that another process opens: it is in a file of /proc.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "fake_cuda/fake.h"

using namespace fake;

namespace {

struct Handle {  // without padding: handles of one allocation are the same
  uint64_t num_bytes;
  int process, fd, device, zero;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));

}  // namespace

extern "C" {

CUresult cuMemHostAlloc(void** data, size_t num_bytes, unsigned flags) {
  FAKE_UNSAFE_CALL("cuMemHostAlloc");
  if (flags != CU_MEMHOSTALLOC_PORTABLE) return CUDA_ERROR_INVALID_VALUE;
  *data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto begin = reinterpret_cast<uint64_t>(*data);
  world().allocations.push_back(
      {begin, begin + num_bytes, CU_MEMORYTYPE_HOST, 0, static_cast<char*>(*data), -1, false});
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* data) {
  FAKE_UNSAFE_CALL("cuMemFreeHost");
  const Allocation* const found = world().find(reinterpret_cast<uint64_t>(data));
  if (!found || found->bytes != data) return CUDA_ERROR_INVALID_VALUE;
  munmap(data, found->end - found->begin);
  world().allocations.remove_if([&](const Allocation& a) { return &a == found; });
  return CUDA_SUCCESS;
}

// Memory of a GPU that the program asks the driver for.
CUresult cuMemAlloc(CUdeviceptr* address, size_t num_bytes) {
  FAKE_UNSAFE_CALL("cuMemAlloc");
  if (num_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *address = allocate(current_device(), num_bytes, /*is_exportable=*/true);
  ++world().values["num_allocated"];
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
  FAKE_UNSAFE_CALL("cuMemFree");
  const Allocation* const found = world().find(address);
  if (!found || found->begin != address) return CUDA_ERROR_INVALID_VALUE;
  release(address);
  --world().values["num_allocated"];
  return CUDA_SUCCESS;
}

// Memory of the program's own, page-locked: it cannot be twice.
CUresult cuMemHostRegister(void* data, size_t num_bytes, unsigned flags) {
  FAKE_UNSAFE_CALL("cuMemHostRegister");
  const auto begin = reinterpret_cast<uint64_t>(data);
  if (flags != CU_MEMHOSTREGISTER_PORTABLE || num_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (world().find(begin)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  world().allocations.push_back(
      {begin, begin + num_bytes, CU_MEMORYTYPE_HOST, 0, static_cast<char*>(data), -1, false});
  return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void* data) {
  FAKE_CALL("cuMemHostUnregister");
  const Allocation* const found = world().find(reinterpret_cast<uint64_t>(data));
  if (!found || found->bytes != data) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  world().allocations.remove_if([&](const Allocation& a) { return &a == found; });
  return CUDA_SUCCESS;
}

// What an engine has left with a GPU that hung.
void fake_free_pinned() {
  const std::lock_guard lock(world().mutex);
  world().allocations.remove_if([](const Allocation& a) {
    if (a.type != CU_MEMORYTYPE_HOST) return false;
    return munmap(a.bytes, a.end - a.begin) == 0;
  });
}

CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* num_bytes, CUdeviceptr address) {
  FAKE_CALL("cuMemGetAddressRange");
  const Allocation* const found = world().find(address);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  return *begin = found->begin, *num_bytes = found->end - found->begin, CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  FAKE_CALL_BEFORE_CONTEXT();
  if (device < kFirstHandle) return CUDA_ERROR_INVALID_DEVICE;
  std::memset(uuid, 0xAB, sizeof(*uuid));
  // As if CUDA_VISIBLE_DEVICES had named others here.
  return uuid->bytes[0] = static_cast<char>(device + world().values["first_gpu"]), CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  FAKE_CALL("cuIpcGetMemHandle");
  const Allocation* const found = world().find(address);
  if (!found || found->fd < 0 || found->begin != address) return CUDA_ERROR_INVALID_VALUE;
  const Handle made{found->end - found->begin, getpid(), found->fd, found->device, 0};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &made, sizeof(made));
  return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  FAKE_UNSAFE_CALL("cuIpcOpenMemHandle");
  Handle given{};
  std::memcpy(&given, &handle, sizeof(given));
  if (given.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  const std::string path =
      "/proc/" + std::to_string(given.process) + "/fd/" + std::to_string(given.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
  void* const place = mmap(nullptr, given.num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* const bytes = mmap(nullptr, given.num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  *address = reinterpret_cast<CUdeviceptr>(place);
  world().allocations.push_back({*address, *address + given.num_bytes, CU_MEMORYTYPE_DEVICE,
                                 given.device, static_cast<char*>(bytes), -1, true});
  return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  FAKE_CALL("cuIpcCloseMemHandle");
  const Allocation* const found = world().find(address);
  if (!found || !found->is_imported || found->begin != address) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(found->begin), found->end - found->begin);
  munmap(found->bytes, found->end - found->begin);
  world().allocations.remove_if([&](const Allocation& a) { return &a == found; });
  return CUDA_SUCCESS;
}

}  // extern "C"
