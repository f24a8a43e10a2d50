// RemoteMemory: the regions of a peer on this machine, and how this process accesses them.
//
//   RemoteMemory memory(page, std::move(parts), process);
//   if (auto copy = memory.prepare(request, piece, means, why_not)) copy->run(limit, done);
//
// Layer: transfer. Memory that the peer has made as SharedMemory is mapped here, and copied to and
// from like any other. Other memory is accessed by process_vm_readv(2) and process_vm_writev(2), if
// the machine allows that. If either end is GPU memory, the GPU copies, provided that the other end
// is accessible in this process.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/fault_guard.h"
#include "transfer/channel/channel.h"
#include "transfer/gpu/gpu_mapping.h"
#include "transfer/gpu/gpu_queue.h"
#include "transfer/memory/control_page.h"
#include "transfer/memory/gpu_ranges.h"
#include "transfer/shm/liveness.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

class RemoteMemory {
 public:
  struct Part {
    Offer offer() const { return {entry.slot, entry.generation}; }

    RegionEntry entry;
    std::shared_ptr<const SharedMemory> memory;  // null: by address
    std::shared_ptr<GpuMapping> gpu{};           // of memory of a GPU, unless it is not to be used
    uint64_t gpu_offset = 0;                     // of the region in that
  };

  // The ways a copy may use.
  struct Means {
    bool host;        // between host memory at both ends
    GpuQueue* queue;  // null: no GPU
  };

  // `process` is the peer's, 0 if it cannot be accessed by address.
  RemoteMemory(std::shared_ptr<const ControlPage> page, std::vector<Part> parts, pid_t process);

  // A piece's ranges, found and held: the peer keeps them while it lives.
  class Copy {
   public:
    // Counts what is done, even when it throws Failure; Inaccessible if memory of either end is.
    void run(const Limit& limit, uint64_t& num_bytes_done);
    uint64_t num_gpu_bytes() const;  // how much of it involves the peer's GPUs

   private:
    friend class RemoteMemory;
    enum class By { kMapping, kAddress, kGpu };
    struct Step {
      uint64_t local;
      uint64_t remote;  // in the peer's process if it is by address, else in this one
      uint64_t num_bytes;
      By by;
      int local_device;  // -1: of the host
      int remote_device;
    };

    void copy_mapped(size_t begin, size_t end, const Limit& limit, uint64_t& num_bytes_done);
    void copy_by_gpu(size_t begin, size_t end, const Limit& limit, uint64_t& num_bytes_done);
    const char* side_of(const Fault& fault) const;  // whose memory it was
    const char* side_of(const std::vector<iovec>& local) const;
    void copy_by_address(size_t begin, size_t end, const Limit& limit, uint64_t& num_bytes_done);

    bool writes_ = false;
    uint64_t request_bytes_ = 0;  // of all pieces: what is too much for the cache is so together
    pid_t process_ = 0;
    GpuQueue* queue_ = nullptr;
    std::vector<Step> steps_;
    std::vector<std::pair<const Part*, ControlPageUse>> uses_;
  };

  // Nothing if one of the ranges is inaccessible, may not be used, or is not known here.
  std::optional<Copy> prepare(const Request& request, const Piece& piece, const Means& means,
                              ErrorReason& why_not) const;
  bool covers(const Request& request) const;  // whether all of it could be prepared

  // Whether the peer certainly still serves the connection.
  bool peer_lives() const { return Liveness::is_alive(page_->liveness()); }

  // How a range can be reached from memory of that GPU, or of the host (-1); tested if it is not
  // mapped. `error`: why not.
  struct Reach {
    bool mapped = false;
    bool by_gpu = false;
    std::string error{};
  };
  Reach reach(const Range& range, int local_device) const;

 private:
  const Part* find(const Range& range, Rights needed) const;
  std::optional<Copy::Step> step(const Part& part, const Range& local, uint64_t remote,
                                 int local_device, const Means& means, ErrorReason& why_not) const;

  const std::shared_ptr<const ControlPage> page_;
  std::vector<Part> parts_;  // in the order of addresses
  const pid_t process_;
};

}  // namespace mk::transfer
