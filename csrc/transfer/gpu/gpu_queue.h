// GpuQueue: copies that involve GPU memory, on a separate stream for each GPU.
//
//   GpuQueue queue;
//   const GpuQueue::Mark mark = queue.begin({{dst, src, num_bytes, /*device=*/0}});
//   queue.wait(mark, limit);
//   queue.copy(copies, limit, num_bytes_done);   // begins, waits and counts, a part at a time
//
// Layer: transfer. One thread. Errors of the driver are GpuFailures.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "transfer/base/limit.h"
#include "transfer/gpu/gpu_stream.h"

namespace mk::transfer {

class GpuQueue {
 public:
  using Mark = std::vector<std::pair<int, uint64_t>>;  // for each GPU, the number of a batch

  GpuQueue() = default;
  GpuQueue(const GpuQueue&) = delete;
  ~GpuQueue() { close(); }

  // Begins copies, in any order among themselves.
  Mark begin(const std::vector<GpuCopy>& copies);
  bool is_over(const Mark& mark);
  void wait(const Mark& mark, const Limit& limit);

  // When it returns or throws, no copy is in flight; see drain().
  void copy(const std::vector<GpuCopy>& copies, const Limit& limit, uint64_t& num_bytes_done);

  // Waits for all that has begun, which no limit can cancel. False: it was not done in 5 s, so a
  // GPU hangs, or the driver has failed; marks are void.
  bool drain() noexcept;

  // Drains, and frees the streams; others are made when needed.
  void close() noexcept;

 private:
  GpuStream& stream(int device);

  std::map<int, GpuStream> streams_;
};

}  // namespace mk::transfer
