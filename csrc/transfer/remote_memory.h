// RemoteMemory: the regions of a peer on this machine, and how this process gets at them.
//
//   RemoteMemory memory(board, std::move(parts), process);
//   if (auto copy = memory.prepare(request, piece)) copy->run(limit, num_bytes_done);
//
// Layer: transfer. Memory that the peer has made as SharedMemory is mapped here, and copied to and
// from like any other; what it got from elsewhere is reached by process_vm_readv(2) and
// process_vm_writev(2), where the machine allows that.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/board.h"
#include "transfer/channel.h"
#include "transfer/wire.h"

namespace mk::transfer {

class RemoteMemory {
 public:
  struct Part {
    RegionEntry entry;
    std::shared_ptr<const SharedMemory> memory;  // null: by address
  };

  // `process` is the peer's, 0 if it cannot be reached by address.
  RemoteMemory(std::shared_ptr<const Board> board, std::vector<Part> parts, pid_t process);

  // A piece's ranges, found and held: as long as it lives, the peer keeps them.
  class Copy {
   public:
    // Counts what is done, also when it throws Failure.
    void run(const Limit& limit, uint64_t& num_bytes_done);

   private:
    friend class RemoteMemory;
    struct Step {
      uint64_t local;
      uint64_t remote;  // in this process if it is mapped, else in the peer's
      uint64_t num_bytes;
      bool mapped;
    };

    void copy_mapped(size_t begin, size_t end, const Limit& limit, uint64_t& num_bytes_done);
    void copy_by_address(size_t begin, size_t end, const Limit& limit, uint64_t& num_bytes_done);

    bool writes_ = false;
    uint64_t num_bytes_ = 0;
    pid_t process_ = 0;
    std::vector<Step> steps_;
    std::vector<std::pair<const Part*, BoardUse>> uses_;
  };

  // Nothing if one of the ranges cannot be reached, may not be used, or is not known here.
  std::optional<Copy> prepare(const Request& request, const Piece& piece) const;
  bool covers(const Request& request) const;  // whether all of it could be prepared

  // How a range can be reached, which is tried if it is not mapped; `error`: why not.
  struct Reach {
    bool mapped = false;
    std::string error{};
  };
  Reach reach(const Range& range) const;

 private:
  const Part* find(const Range& range, Rights needed) const;

  const std::shared_ptr<const Board> board_;
  std::vector<Part> parts_;  // in the order of addresses
  const pid_t process_;
};

}  // namespace mk::transfer
