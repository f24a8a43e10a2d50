// Staging: moves GPU memory to and from a socket or a disk, which can access only host memory:
// through a few chunks of pinned memory, so that one is copied while another is moved.
//
//   Staging staging;
//   staging.gather(parts, gpus, limit, send);     // send = [&](iovec* host, size_t n) { ... }
//   const ErrorReason why_not = staging.scatter(parts, gpus, limit, receive);
//
// Layer: transfer. One thread. Parts in host memory are moved directly, without a copy; if there
// are no others, a call costs nothing. Pinned memory is allocated on first use.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "transfer/base/error.h"
#include "transfer/gpu/gpu_queue.h"
#include "transfer/memory/gpu_ranges.h"

namespace mk::transfer {

class Staging {
 public:
  static constexpr uint64_t kChunkBytes = 1ull << 20;
  static constexpr size_t kNumChunks = 4;

  // Moves parts of host memory, in order; may change them.
  using Move = std::function<void(iovec* parts, size_t num_parts)>;

  ~Staging() { close(); }

  // Moves the contents of the parts, and may change the list. Throws Refused if a GPU fails before
  // anything was moved, GpuFailure if later; Ended; and as `move`. No copy is in flight then; see
  // GpuQueue::drain().
  void gather(std::vector<iovec>& parts, const GpuRanges& gpus, const Limit& limit,
              const Move& move);

  // Moves data into the parts, and may change the list. When it returns, all is in place, and
  // visible to GPU work that begins from then on. Otherwise returns why not, having moved all of it
  // nonetheless, so that the connection stays usable: a GPU failed, or `move` threw Inaccessible.
  // Throws what else `move` throws, and Ended.
  ErrorReason scatter(std::vector<iovec>& parts, const GpuRanges& gpus, const Limit& limit,
                      const Move& move);

  // Frees the memory and the streams, until they are needed again.
  void close() noexcept;

 private:
  struct Chunk {
    char* memory = nullptr;
    std::vector<iovec> parts{};  // of host memory: the chunk's own, and what is there already
    std::vector<GpuCopy> copies{};
    GpuQueue::Mark mark{};
  };

  // Walks over parts.
  struct Cursor {
    const std::vector<iovec>& parts;
    const GpuRanges& gpus;
    size_t index = 0;
    uint64_t offset = 0;

    bool at_end() const { return index == parts.size(); }
  };

  void prepare(const Cursor& cursor);
  void fill(Chunk& chunk, Cursor& cursor, bool gathers) const;
  void scatter_chunks(Cursor& cursor, const Limit& limit, const Move& move);
  static void skip(Cursor& cursor, const Move& move);
  void settle() noexcept;

  GpuQueue queue_;
  std::unique_ptr<PinnedMemory> pinned_;
  std::array<Chunk, kNumChunks> chunks_;
};

}  // namespace mk::transfer
