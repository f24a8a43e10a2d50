// GpuFile: GPUDirect Storage: a disk reads a file into GPU memory, and writes it from there,
// without going through host memory. By NVIDIA's libcufile, if installed.
//
//   std::string why_not;
//   if (const auto file = GpuFile::of(fd, why_not)) file->read(gpu, num_bytes, offset);
//
// Layer: transfer. Thread-safe. Results are like those of IoDone: bytes, or a negative error
// number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/owner.h"

namespace mk::transfer {

class GpuFile {
 public:
  // `fd` bypasses the page cache, and outlives the object. Null: `why_not` has the reason.
  static std::unique_ptr<GpuFile> of(int fd, std::string& why_not);
  GpuFile(const GpuFile&) = delete;
  ~GpuFile();

  // In the GPU's primary context, which is current.
  int64_t read(char* gpu, uint64_t num_bytes, uint64_t offset) const;
  int64_t write(const char* gpu, uint64_t num_bytes, uint64_t offset) const;

 private:
  explicit GpuFile(void* handle) : handle_(handle) {}
  void* const handle_;
  const Owner owner_;
};

// An error of cuFile itself, or of the GPU's driver: the file may be fine.
constexpr int64_t kGpuFileError = -5000;
inline bool is_gpu_file_error(int64_t result) { return result <= kGpuFileError; }

}  // namespace mk::transfer
