#include "transfer/file/gpu_file.h"

#include <cerrno>

#include "common/check.h"
#include "common/cuda_driver.h"

#if MK_HAVE_CUDA_H
#include "transfer/file/cufile_api.h"
#endif

namespace mk::transfer {

#if MK_HAVE_CUDA_H
namespace {

// clang-format off
#define MK_CUFILE_FUNCTIONS(X)                                                       \
  X(cuFileDriverOpen) X(cuFileDriverGetProperties) X(cuFileHandleRegister)           \
  X(cuFileHandleDeregister) X(cuFileRead) X(cuFileWrite)
// clang-format on
MK_DYNLIB(CuFileLibrary, "libcufile.so.0", MK_CUFILE_FUNCTIONS)

constexpr int kAlreadyOpen = 5026;  // by another library of this process

std::string reason_of(const char* function, const CUfileError_t& error) {
  const std::string cuda = error.cu_err == CUDA_SUCCESS ? "" : ", " + cuda_error_name(error.cu_err);
  return concat(function, ": error ", static_cast<int>(error.err), cuda);
}

// Empty if a disk can reach a GPU directly. Otherwise cuFile would copy through host memory, as we
// do, but in blocking calls.
std::string why_no_driver() {
  if (!CuFileLibrary::reason().empty()) return CuFileLibrary::reason();
  const CuFileLibrary& library = CuFileLibrary::get();
  // It initializes CUDA, so it is asked for only when a request has memory of a GPU. It stays open
  // until the process exits: others may use it.
  static const CUfileError_t opened = library.p_cuFileDriverOpen();
  if (opened.err != 0 && opened.err != kAlreadyOpen) return reason_of("cuFileDriverOpen", opened);
  CUfileDrvProps_t props{};
  const CUfileError_t told = library.p_cuFileDriverGetProperties(&props);
  if (told.err != 0) return reason_of("cuFileDriverGetProperties", told);
  const bool has_p2p = props.fflags >> CU_FILE_P2P_SUPPORTED & 1;
  if (props.nvfs.major_version == 0 && !has_p2p) return "cuFile has neither nvidia-fs nor P2PDMA";
  return "";
}

int64_t result_of(ssize_t moved) { return moved == -1 ? -errno : moved; }

}  // namespace

std::unique_ptr<GpuFile> GpuFile::of(int fd, std::string& why_not) {
  why_not = why_no_driver();
  if (!why_not.empty()) return nullptr;
  CUfileDescr_t description{};
  description.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
  description.handle.fd = fd;
  CUfileHandle_t handle = nullptr;
  const CUfileError_t error = CuFileLibrary::get().p_cuFileHandleRegister(&handle, &description);
  if (error.err != 0) {
    why_not = reason_of("cuFileHandleRegister", error);
    return nullptr;
  }
  return std::unique_ptr<GpuFile>(new GpuFile(handle));
}

GpuFile::~GpuFile() {
  if (!owner_.forked()) CuFileLibrary::get().p_cuFileHandleDeregister(handle_);
}

int64_t GpuFile::read(char* gpu, uint64_t num_bytes, uint64_t offset) const {
  const auto at = static_cast<off_t>(offset);
  return result_of(CuFileLibrary::get().p_cuFileRead(handle_, gpu, num_bytes, at, 0));
}

int64_t GpuFile::write(const char* gpu, uint64_t num_bytes, uint64_t offset) const {
  const auto at = static_cast<off_t>(offset);
  return result_of(CuFileLibrary::get().p_cuFileWrite(handle_, gpu, num_bytes, at, 0));
}

#else

std::unique_ptr<GpuFile> GpuFile::of(int, std::string& why_not) {
  why_not = "built without cuda.h";
  return nullptr;
}
GpuFile::~GpuFile() = default;
int64_t GpuFile::read(char*, uint64_t, uint64_t) const { return -ENOSYS; }
int64_t GpuFile::write(const char*, uint64_t, uint64_t) const { return -ENOSYS; }

#endif

}  // namespace mk::transfer
