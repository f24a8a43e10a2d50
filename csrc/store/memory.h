// PoolMemory: the memory of a pool, mapped by every process that uses it.
//
//   PoolMemory made = PoolMemory::create("/dev/shm/kv", num_bytes, [](char* base) { init(base); });
//   PoolMemory mapped = PoolMemory::open(made.path());
//
// With a path it is a file on a memory file system, which stays until it is removed; without one it
// has no name, and is gone with the last process that maps it. Layer: store.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/fd.h"
#include "common/shared_memory.h"

namespace mk::store {

class PoolMemory {
 public:
  // Zeroed memory, which others see under `path` once `init` has returned. All of a file is there
  // at once, so that nobody meets a full file system at a first touch. Throws SystemError (EEXIST,
  // ENOSPC, ...).
  static std::unique_ptr<PoolMemory> create(const std::string& path, uint64_t num_bytes,
                                            const std::function<void(char* base)>& init);
  static std::unique_ptr<PoolMemory> open(const std::string& path);
  PoolMemory(const PoolMemory&) = delete;
  ~PoolMemory();

  char* data() const { return data_; }
  uint64_t num_bytes() const { return num_bytes_; }
  // Where open() finds it: of nameless memory, only for as long as its maker lives.
  const std::string& path() const { return path_; }

 private:
  PoolMemory() = default;
  void map();

  std::string path_;
  std::unique_ptr<SharedMemory> nameless_;
  Fd file_;
  uint64_t num_bytes_ = 0;
  char* data_ = nullptr;
};

}  // namespace mk::store
