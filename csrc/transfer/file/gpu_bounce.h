// GpuBounce: chunks of pinned memory through which a disk reads and writes GPU memory, as many at a
// time as there are.
//
//   GpuBounce bounce;
//   char* const chunk = bounce.take(/*device=*/0);            // while bounce.has_room()
//   bounce.gather(parts, gpus, chunk, limit);                 // before the disk writes it
//   bounce.scatter(chunk, parts, gpus, limit);                // after the disk has read it
//   bounce.give_back(chunk);
//
// Layer: transfer. One thread. While one chunk is copied, the disk uses the others. Errors are
// GpuFailures, and Ended.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transfer/gpu/gpu_queue.h"
#include "transfer/memory/gpu_ranges.h"

namespace mk::transfer {

class GpuBounce {
 public:
  static constexpr uint64_t kChunkBytes = 1ull << 20;
  static constexpr size_t kNumChunks = 4;

  ~GpuBounce() { close(); }

  bool has_room() const { return !pinned_ || !free_.empty(); }
  char* take(int device);  // the first time, pinned by that GPU's context
  void give_back(char* chunk) { free_.push_back(chunk); }

  // Copy parts, which may also be in host memory, into the chunk and out of it. They return when
  // the copy is done.
  void gather(const std::vector<iovec>& parts, const GpuRanges& gpus, char* chunk,
              const Limit& limit);
  void scatter(const char* chunk, const std::vector<iovec>& parts, const GpuRanges& gpus,
               const Limit& limit);

  // Afterwards nothing is in flight, and no chunk is taken.
  void settle() noexcept;

  // Frees the memory and the streams, until they are needed again.
  void close() noexcept;

 private:
  GpuQueue queue_;
  std::unique_ptr<PinnedMemory> pinned_;
  std::vector<char*> free_;
};

}  // namespace mk::transfer
