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
#include <optional>
#include <string>

#include "common/fd.h"
#include "transfer/gpu_file.h"

namespace mk::transfer {

// "file:/mnt/ssd/pool" is what such a peer is called. Nothing: it is the name of an engine. Throws
// InvalidArgument: the path is not absolute.
std::optional<std::string> path_of_file(const std::string& name);

// What goes past the page cache: powers of two. Of places in the file, which are multiples of a
// page, too, so that no page is written both ways at once; and of memory addresses.
struct DirectRules {
  uint64_t file_align = 0;  // 0: nothing goes past it
  uint64_t memory_align = 0;
};

class DiskFile {
 public:
  // Throws Failure: there is none, it is a directory, it may not be read.
  explicit DiskFile(const std::string& path);

  uint64_t num_bytes() const;                                      // now. Throws SystemError.
  const std::string& why_read_only() const { return read_only_; }  // "" if it may be written
  const DirectRules& direct_rules() const { return rules_; }
  int fd(bool direct) const { return (direct ? direct_ : buffered_).get(); }

  // For what goes past the page cache, from and to memory of GPUs. Null: by way of host memory.
  const GpuFile* gpu_file() const;
  std::string why_no_gpu_file() const;
  void give_up_gpu_file(const std::string& why) const;  // its users may go on for a while

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
