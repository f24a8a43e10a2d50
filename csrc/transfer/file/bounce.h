// Bounce: aligned memory through which a disk reads and writes unaligned memory.
//
//   Bounce bounce;
//   pwrite(fd, bounce.gather(parts, num_bytes), num_bytes, offset);
//   pread(fd, bounce.room(num_bytes), num_bytes, offset);   bounce.scatter(parts);
//
// Layer: transfer.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace mk::transfer {

class Bounce {
 public:
  char* room(uint64_t num_bytes);  // throws std::bad_alloc
  char* gather(const std::vector<iovec>& parts, uint64_t num_bytes);
  void scatter(const std::vector<iovec>& parts) const;

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  uint64_t num_bytes_ = 0;
};

}  // namespace mk::transfer
