// Checksums of what a request moves: the initiator has one for each range of its own memory; the
// target compares them with the contents of its memory afterwards.
//
//   Checksummer checksummer(GpuRanges(regions), staging, limit);
//   uint64_t sum = checksummer.sum(range);                         // XXH3, 64 bits
//   size_t num_equal = checksummer.count_equal(table, checksums);  // the target
//   if (num_equal < table.size()) fail(checksum_reason(...));      // the initiator
//
// Layer: transfer. They detect faults; they do not authenticate. GPU memory is summed on the host,
// through staging.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "transfer/base/limit.h"
#include "transfer/gpu/staging.h"
#include "transfer/memory/gpu_ranges.h"
#include "transfer/request/piece.h"

namespace mk::transfer {

class Checksummer {
 public:
  Checksummer(GpuRanges gpus, Staging& staging, const Limit& limit)
      : gpus_(std::move(gpus)), staging_(staging), limit_(limit) {}

  // Looks at the limit every few MiB, and throws Ended; Refused and GpuFailure as Staging::gather;
  // Inaccessible.
  uint64_t sum(const Range& range);

  // Of the piece's ranges in local memory.
  void sum(const Request& request, const Piece& piece, std::vector<uint64_t>& checksums);

  // How many ranges from the first on have these checksums.
  size_t count_equal(const std::vector<Range>& ranges, const std::vector<uint64_t>& checksums);

 private:
  GpuRanges gpus_;
  Staging& staging_;
  const Limit& limit_;
  std::vector<iovec> parts_;
  uint64_t since_check_ = 0;  // bytes
};

// The reason when ranges differ; the index-th of a piece.
ErrorReason checksum_reason(uint64_t remote, uint64_t local, uint64_t num_bytes);
ErrorReason checksum_reason(const Request& request, const Piece& piece, size_t index);

}  // namespace mk::transfer
