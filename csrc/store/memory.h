// PoolMemory: the memory of a pool, mapped by every process that uses it.
//
//   auto made = PoolMemory::create("/dev/shm/kv", num_bytes, group, [](char* base) { init(base);
//   }); auto mapped = PoolMemory::open(made->path(), trust);
//
// With a path it is a file on a memory file system, which persists until it is removed; without one
// it has no name and disappears with the last process that maps it. Whoever can write to it can
// read what others store, and can truncate a file, which kills those that touch the removed part.
// So open() takes only what belongs to those who are trusted. Layer: store.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/fd.h"
#include "common/shared_memory.h"

namespace mk::store {

// Who may have made a file, and may write to it. No one else may.
struct Trust {
  std::optional<uint32_t> owner;  // its user; none: the one of this process
  std::optional<uint32_t> group;  // whose members may write to it; none: only its owner may
};

class PoolMemory {
 public:
  // Zeroed memory, published under `path` once `init` has returned. A file is fully allocated at
  // once, so that no first touch can hit a full file system. Its mode is 0600, or 0660 with a
  // group. Throws SystemError (EEXIST, ENOSPC, EPERM: not a member of the group, ...).
  static std::unique_ptr<PoolMemory> create(const std::string& path, uint64_t num_bytes,
                                            std::optional<uint32_t> group,
                                            const std::function<void(char* base)>& init);
  // Throws SystemError; InvalidArgument: a link, no file, or one of others.
  static std::unique_ptr<PoolMemory> open(const std::string& path, const Trust& trust = {});
  PoolMemory(const PoolMemory&) = delete;
  ~PoolMemory();

  char* data() const { return data_; }
  uint64_t num_bytes() const { return num_bytes_; }
  Fd reopen() const;
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
