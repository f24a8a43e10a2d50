#include "transfer/batch.h"

#include <algorithm>

#include "transfer/wire.h"

namespace mk::transfer {
namespace {

uint64_t max_batch_bytes(const Request& request) {
  return request.direction == Direction::kWrite ? kMaxWriteBytes : kMaxReadBytes;
}

}  // namespace

BatchCursor::BatchCursor(const Request& request)
    : request_(request), max_bytes_(max_batch_bytes(request)) {}

bool BatchCursor::next(Batch& batch) {
  batch.first_range = index_;
  batch.num_bytes = 0;
  batch.remote.clear();
  batch.local.clear();
  while (index_ < request_.local.size() && batch.remote.size() < kMaxBatchRanges &&
         batch.num_bytes < max_bytes_) {
    const Range& local = request_.local[index_];
    const uint64_t step = std::min(local.num_bytes - offset_, max_bytes_ - batch.num_bytes);
    batch.remote.push_back({request_.remote[index_].address + offset_, step});
    append_part(batch.local, local.address + offset_, step);
    batch.num_bytes += step;
    offset_ += step;
    if (offset_ == local.num_bytes) {
      ++index_;
      offset_ = 0;
    }
  }
  return !batch.remote.empty();
}

bool fits_one_batch(const Request& request) {
  return request.local.size() <= kMaxBatchRanges && request.num_bytes <= max_batch_bytes(request);
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
