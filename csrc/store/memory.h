// PoolMemory: the memory of a pool, mapped by every process that uses it.
//
//   PoolMemory made = PoolMemory::create("/dev/shm/kv", num_bytes, [](char* base) { init(base); });
//   PoolMemory mapped = PoolMemory::open(made.path());
//
// With a path it is a file on a memory file system, which persists until it is removed; without one
// it has no name and disappears with the last process that maps it. Layer: store.
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
  // Zeroed memory, published under `path` once `init` has returned. A file is fully allocated at
  // once, so that no first touch can hit a full file system. Throws SystemError (EEXIST, ENOSPC,
  // ...).
  static std::unique_ptr<PoolMemory> create(const std::string& path, uint64_t num_bytes,
                                            const std::function<void(char* base)>& init);
  static std::unique_ptr<PoolMemory> open(const std::string& path);
  PoolMemory(const PoolMemory&) = delete;
  ~PoolMemory();

  char* data() const { return data_; }
  uint64_t num_bytes() const { return num_bytes_; }
  // The path for open(); that of nameless memory is valid only while its creator lives.
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
