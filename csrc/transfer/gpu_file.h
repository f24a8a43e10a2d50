// GpuFile: GPUDirect Storage: a file from which a disk reads into memory of GPUs, and into which it
// writes from there, without a way through the host's. By NVIDIA's libcufile, where it is.
//
//   std::string why_not;
//   if (const auto file = GpuFile::of(fd, why_not)) file->read(gpu, num_bytes, offset);
//
// Layer: transfer. Thread-safe. Results are as those of IoDone: bytes, or an error number below 0.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/owner.h"

namespace mk::transfer {

class GpuFile {
 public:
  // `fd` is open past the page cache, and stays so for longer. Null: `why_not` says why.
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

// An error of cuFile's own, or of the GPU's driver: the file itself may be fine.
constexpr int64_t kGpuFileError = -5000;
inline bool is_gpu_file_error(int64_t result) { return result <= kGpuFileError; }

}  // namespace mk::transfer
