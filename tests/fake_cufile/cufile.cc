// A libcufile.so.0 for tests, beside the made-up driver of fake_cuda/, whose memory it reads and
// writes as cuFile does: whole pages of a file that is open past the page cache, in a context of
// the GPU that has the memory. What a caller does otherwise is an error of cuFile's.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fake_cuda/fake.h"
#include "transfer/file/cufile_api.h"

// Of the made-up driver.
extern "C" {
uint64_t fake_bytes(uint64_t address);
}

namespace {

struct State {
  std::mutex mutex;
  std::set<CUfileHandle_t> handles;
  int is_there = 0;  // whether a disk can reach a GPU
  int fault = 0;     // what the calls after the next `fault_after` return, below 0
  int64_t fault_after = 0, num_faults = 0;
  int64_t num_reads = 0, num_writes = 0;
  int64_t most_bytes = INT64_MAX;  // of a call
};
State& state() {
  static State* const instance = new State;
  return *instance;
}

struct File {
  int fd;
};

ssize_t move(CUfileHandle_t handle, uint64_t gpu, size_t size, off_t offset, bool writes) {
  {
    const std::lock_guard lock(state().mutex);
    if (!state().handles.count(handle)) return -5027;
    ++(writes ? state().num_writes : state().num_reads);
    if (state().num_faults > 0 && state().fault_after-- <= 0) {
      --state().num_faults;
      if (state().fault > -5000) {
        errno = -state().fault;
        return -1;
      }
      return state().fault;
    }
    if (static_cast<int64_t>(size) > state().most_bytes) size = state().most_bytes;
  }
  if (offset % 4096 != 0) return -5022;
  CUcontext context = nullptr;
  cuCtxGetCurrent(&context);
  if (!context) return -5047;
  int device = -1;
  CUpointer_attribute what = CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
  void* into = &device;
  cuPointerGetAttributes(1, &what, &into, gpu);
  CUcontext own = nullptr;
  CUdevice gpu_handle = 0;
  cuDeviceGet(&gpu_handle, device);
  cuDevicePrimaryCtxRetain(&own, gpu_handle);
  cuDevicePrimaryCtxRelease(gpu_handle);
  if (own != context) return -5015;
  char* const bytes = reinterpret_cast<char*>(fake_bytes(gpu));
  std::vector<char> copy(bytes, bytes + size);
  const int fd = static_cast<File*>(handle)->fd;
  // Of memory that need not be aligned: through the page cache, of which nothing may stay.
  const int buffered = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC);
  const ssize_t moved = writes ? pwrite(buffered, copy.data(), size, offset)
                               : pread(buffered, copy.data(), size, offset);
  fsync(buffered);
  posix_fadvise(buffered, 0, 0, POSIX_FADV_DONTNEED);
  close(buffered);
  if (!writes && moved > 0) std::copy_n(copy.data(), moved, bytes);
  return moved;
}

}  // namespace

extern "C" {

void fake_cufile_set(int is_there, int64_t most_bytes) {
  const std::lock_guard lock(state().mutex);
  state().is_there = is_there;
  state().most_bytes = most_bytes;
  state().num_reads = state().num_writes = state().num_faults = 0;
}
void fake_cufile_fail(int result, int64_t after, int64_t count) {
  const std::lock_guard lock(state().mutex);
  state().fault = result, state().fault_after = after, state().num_faults = count;
}
int64_t fake_cufile_reads() { return state().num_reads; }
int64_t fake_cufile_writes() { return state().num_writes; }
int64_t fake_cufile_handles() { return static_cast<int64_t>(state().handles.size()); }

CUfileError_t cuFileDriverOpen(void) { return {}; }
CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t* props) {
  const std::lock_guard lock(state().mutex);
  *props = {};
  props->nvfs.major_version = state().is_there == 1 ? 2 : 0;
  props->fflags = state().is_there == 2 ? 1u << CU_FILE_P2P_SUPPORTED : 0;
  return {};
}
CUfileError_t cuFileHandleRegister(CUfileHandle_t* handle, CUfileDescr_t* description) {
  const std::lock_guard lock(state().mutex);
  const int fd = description->handle.fd;
  if (description->type != CU_FILE_HANDLE_TYPE_OPAQUE_FD) return {5022, CUDA_SUCCESS};
  if (!(fcntl(fd, F_GETFL) & O_DIRECT)) return {5020, CUDA_SUCCESS};
  if (state().num_faults > 0 && state().fault_after < 0) return {-state().fault, CUDA_SUCCESS};
  *handle = new File{fd};
  state().handles.insert(*handle);
  return {};
}
void cuFileHandleDeregister(CUfileHandle_t handle) {
  const std::lock_guard lock(state().mutex);
  if (state().handles.erase(handle)) delete static_cast<File*>(handle);
}
ssize_t cuFileRead(CUfileHandle_t handle, void* base, size_t size, off_t offset, off_t at) {
  return move(handle, reinterpret_cast<uint64_t>(base) + at, size, offset, false);
}
ssize_t cuFileWrite(CUfileHandle_t handle, const void* base, size_t size, off_t offset, off_t at) {
  return move(handle, reinterpret_cast<uint64_t>(base) + at, size, offset, true);
}

}  // extern "C"
