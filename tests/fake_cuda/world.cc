// What tests set and ask, see driver.py; devices, contexts and where addresses are.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "fake_cuda/fake.h"
#include "fake_cuda/pointer_attributes.h"

namespace fake {
namespace {

int contexts[kNumDevices];  // their addresses are the handles
thread_local std::vector<CUcontext> stack;
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
pid_t initialized_in = 0;

bool is_device(CUdevice handle) {
  return handle >= kFirstHandle && handle < kFirstHandle + kNumDevices;
}

}  // namespace

World& world() {
  static World* const instance = new World;
  return *instance;
}

bool is_initialized() { return initialized_in == getpid(); }

void initialize() {
  if (initialized_in == 0) initialized_in = getpid();
}

bool breaks_capture() {
  return world().values["others_capture"] && capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUcontext current_context() { return stack.empty() ? nullptr : stack.back(); }

int current_device() { return static_cast<int>(reinterpret_cast<int*>(stack.back()) - contexts); }

uint64_t allocate(int device, uint64_t num_bytes, bool is_exportable) {
  const int fd = memfd_create("gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(num_bytes)) < 0) return 0;
  void* const place = mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* const bytes = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (!is_exportable) close(fd);
  const auto begin = reinterpret_cast<uint64_t>(place);
  world().allocations.push_back({begin, begin + num_bytes, CU_MEMORYTYPE_DEVICE, device,
                                 static_cast<char*>(bytes), is_exportable ? fd : -1, false});
  return begin;
}

void release(uint64_t address) {
  world().allocations.remove_if([&](const Allocation& a) {
    if (a.begin != address) return false;
    munmap(reinterpret_cast<void*>(a.begin), a.end - a.begin);
    munmap(a.bytes, a.end - a.begin);
    if (a.fd >= 0) close(a.fd);
    return true;
  });
}

Allocation* World::find(uint64_t address) {
  for (Allocation& a : allocations) {
    if (a.begin <= address && address < a.end) return &a;
  }
  return nullptr;
}

char* World::bytes_at(uint64_t address, uint64_t num_bytes) {
  const Allocation* const a = find(address);
  if (!a) return reinterpret_cast<char*>(address);  // pageable memory of the host
  return num_bytes <= a->end - address ? a->bytes + (address - a->begin) : nullptr;
}

CUresult World::fault(const char* function) {
  ++values[function];
  const auto found = faults.find(function);
  if (found == faults.end() || found->second.after-- > 0) return CUDA_SUCCESS;
  const CUresult error = found->second.error;
  faults.erase(found);
  return error;
}

}  // namespace fake

using namespace fake;

extern "C" {

void fake_set(const char* name, int64_t value) {
  const std::lock_guard lock(world().mutex);
  world().values[name] = value;
}

// What is set, or how often a function was called; or what there is of something.
int64_t fake_get(const char* name) {
  const std::lock_guard lock(world().mutex);
  World& w = world();
  const auto count = [&](auto is) {
    int64_t n = 0;
    for (const Allocation& a : w.allocations) n += is(a);
    return n;
  };
  if (!std::strcmp(name, "num_streams")) return static_cast<int64_t>(w.streams.size());
  if (!std::strcmp(name, "num_events")) return static_cast<int64_t>(w.events.size());
  if (!std::strcmp(name, "num_imports")) {
    return count([](const Allocation& a) { return a.is_imported; });
  }
  if (!std::strcmp(name, "num_pinned")) {
    return count([](const Allocation& a) { return a.type == CU_MEMORYTYPE_HOST; });
  }
  return w.values[name];
}

void fake_fail(const char* function, int64_t after, int error) {
  const std::lock_guard lock(world().mutex);
  world().faults[function] = {after, static_cast<CUresult>(error)};
}

void fake_clear() {
  const std::lock_guard lock(world().mutex);
  world().faults.clear();
}

uint64_t fake_allocate(int device, uint64_t num_bytes, int is_exportable) {
  const std::lock_guard lock(world().mutex);
  initialize();
  return allocate(device, num_bytes, is_exportable);
}

void fake_free(uint64_t address) {
  const std::lock_guard lock(world().mutex);
  release(address);
}

uint64_t fake_bytes(uint64_t address) {
  const std::lock_guard lock(world().mutex);
  return reinterpret_cast<uint64_t>(world().bytes_at(address, 1));
}

CUresult cuInit(unsigned) {
  const std::lock_guard lock(world().mutex);
  if (const CUresult error = world().fault("cuInit")) return error;
  initialize();
  return is_initialized() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}
CUresult cuDriverGetVersion(int* version) { return *version = 12080, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) {
  FAKE_CALL_BEFORE_CONTEXT();
  return *count = kNumDevices, CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CALL_BEFORE_CONTEXT();
  if (ordinal < 0 || ordinal >= kNumDevices) return CUDA_ERROR_INVALID_DEVICE;
  return *device = kFirstHandle + ordinal, CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  static const std::map<CUresult, const char*> names = {
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
      {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}};
  const auto found = names.find(error);
  return *name = found == names.end() ? nullptr : found->second, CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  FAKE_CALL_BEFORE_CONTEXT();
  return *context = current_context(), CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
  FAKE_CALL_BEFORE_CONTEXT();
  return stack.push_back(context), CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.back();
  return stack.pop_back(), CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  FAKE_CALL_BEFORE_CONTEXT();
  return std::swap(capture_mode, *mode), CUDA_SUCCESS;
}
// That of a program which uses both GPUs.
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  FAKE_CALL_BEFORE_CONTEXT();
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAKE_CALL_BEFORE_CONTEXT();
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  ++world().values["num_retained"];
  return *context = reinterpret_cast<CUcontext>(&contexts[device - kFirstHandle]), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  FAKE_CALL_BEFORE_CONTEXT();
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  return --world().values["num_retained"], CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice other) {
  FAKE_CALL_BEFORE_CONTEXT();
  if (!is_device(device) || !is_device(other)) return CUDA_ERROR_INVALID_DEVICE;
  return *can = 1, CUDA_SUCCESS;
}
CUresult cuCtxEnablePeerAccess(CUcontext, unsigned) {
  FAKE_CALL("cuCtxEnablePeerAccess");
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values,
                                CUdeviceptr address) {
  FAKE_CALL("cuPointerGetAttributes");
  const Allocation none{0, 0, 0, 0, nullptr, -1, false};
  const Allocation* const known = world().find(address);
  const Allocation& found = known ? *known : none;
  return answer_attributes(count, attributes, values,
                           {found.type, found.device, known ? address : 0, found.begin, found.end});
}

}  // extern "C"
