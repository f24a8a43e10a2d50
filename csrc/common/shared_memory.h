// SharedMemory: memory that other processes of this machine can map. It has no name in any file
// system and disappears with the last process that has it.
//
//   SharedMemory memory(1 << 30);
//   std::memset(memory.data(), 0, memory.num_bytes());
//   if (const auto part = SharedMemory::find(address, num_bytes)) send(part->fd, part->offset);
//
// Layer: common.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "common/fd.h"

namespace mk {

class SharedMemory {
 public:
  // Throws InvalidArgument (no bytes), SystemError (ENOMEM, ...).
  explicit SharedMemory(uint64_t num_bytes);
  // Maps memory that another process has created. Throws SystemError.
  explicit SharedMemory(const Fd& fd);
  SharedMemory(const SharedMemory&) = delete;
  ~SharedMemory();

  char* data() const { return data_; }
  uint64_t num_bytes() const { return num_bytes_; }
  const Fd& fd() const { return fd_; }  // if it was created here

  // The part of a SharedMemory created here that holds a range of this process's memory.
  struct Part {
    Fd fd;        // a copy
    uint64_t id;  // of the SharedMemory, unique in this process
    uint64_t offset;
  };
  static std::optional<Part> find(uint64_t address, uint64_t num_bytes);

 private:
  void map(int fd);

  Fd fd_;
  uint64_t id_ = 0;
  uint64_t num_bytes_;
  char* data_ = nullptr;
};

}  // namespace mk
