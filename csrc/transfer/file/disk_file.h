// DiskFile: a file or block device of this machine, open twice: past the page cache (O_DIRECT) and
// through it.
//
//   const DiskFile file("/mnt/ssd/pool");
//   if (range.end <= file.num_bytes()) pread(file.fd(/*direct=*/false), ...);
//
// Layer: transfer. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "common/fd.h"
#include "transfer/file/gpu_file.h"

namespace mk::transfer {

// "file:/mnt/ssd/pool" is the name of such a peer. Throws InvalidArgument: it is not such a name,
// or the path is not absolute.
std::string path_of_file(const std::string& name);

// Requirements for bypassing the page cache: powers of two. For offsets in the file, which are also
// multiples of a page, so that no page is written both ways at once; and for memory addresses.
struct DirectRules {
  uint64_t file_align = 0;  // 0: nothing bypasses it
  uint64_t memory_align = 0;
};

class DiskFile {
 public:
  // Throws Failure: it does not exist, is a directory, or may not be read.
  explicit DiskFile(const std::string& path);

  uint64_t num_bytes() const;                                      // now. Throws SystemError.
  const std::string& why_read_only() const { return read_only_; }  // "" if it is writable
  const DirectRules& direct_rules() const { return rules_; }
  int fd(bool direct) const { return (direct ? direct_ : buffered_).get(); }

  // For transfers past the page cache from and to GPU memory. Null: go through host memory.
  const GpuFile* gpu_file() const;
  std::string why_no_gpu_file() const;
  void give_up_gpu_file(const std::string& why) const;  // current users may continue for a while

 private:
  void open_direct(const std::string& path, int access);

  Fd buffered_;
  Fd direct_;
  bool is_device_;
  std::string read_only_;
  DirectRules rules_;

  mutable std::mutex gpu_mutex_;
  mutable std::unique_ptr<const GpuFile> gpu_file_;  // after direct_, which it uses
  mutable bool has_looked_ = false;                  // for it: cuFile takes memory and threads
  mutable std::string why_no_gpu_file_;              // empty: there is one, and it works
};

}  // namespace mk::transfer
