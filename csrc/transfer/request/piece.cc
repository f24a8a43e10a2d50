#include "transfer/request/piece.h"

#include <algorithm>

#include "transfer/wire/wire.h"

namespace mk::transfer {

bool Cutter::next(Piece& piece) {
  piece = {index_, 0, offset_, 0, position_};
  while (!at_end() && piece.num_ranges < kMaxBatchRanges && piece.num_bytes < max_bytes_) {
    const uint64_t here = request_.size_of(index_) - offset_;
    const uint64_t step = std::min(here, max_bytes_ - piece.num_bytes);
    piece.num_ranges += 1;
    piece.num_bytes += step;
    offset_ += step;
    position_ += step;
    if (step == here) {
      ++index_;
      offset_ = 0;
    }
  }
  return piece.num_ranges > 0;
}

void fill(const Request& request, const Piece& piece, Batch& batch) {
  batch.remote.clear();
  batch.local.clear();
  for_each_range(request, piece, [&](uint64_t local, uint64_t remote, uint64_t num_bytes) {
    batch.remote.push_back({remote, num_bytes});
    append_part(batch.local, local, num_bytes);
  });
}

void append_part(std::vector<iovec>& parts, uint64_t address, uint64_t num_bytes) {
  if (!parts.empty()) {
    iovec& last = parts.back();
    if (reinterpret_cast<uint64_t>(last.iov_base) + last.iov_len == address) {
      last.iov_len += num_bytes;
      return;
    }
  }
  parts.push_back({reinterpret_cast<void*>(address), num_bytes});
}

}  // namespace mk::transfer
