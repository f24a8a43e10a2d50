#include "transfer/file/file_op.h"

#include <algorithm>

namespace mk::transfer {

bool OpCutter::next(FileOp& op) {
  if (at_end()) return false;
  const OpCutter start = *this;
  op.direct = op.bounced = false;
  const uint64_t page = rules_.file_align;
  const uint64_t past_page = page == 0 ? 0 : place() & (page - 1);
  if (past_page > 0) {
    take(page - past_page, op);
    return true;
  }
  take(kMaxOpBytes, op);
  if (page == 0 || op.num_bytes < page) return true;
  op.direct = true;
  op.bounced = !is_aligned(op);
  const uint64_t most = op.bounced ? kMaxBouncedBytes : kMaxOpBytes;
  const uint64_t whole = std::min(op.num_bytes, most) & ~(page - 1);
  if (whole < op.num_bytes) {
    *this = start;
    take(whole, op);
    op.bounced = !is_aligned(op);
  }
  return true;
}

// Takes what follows contiguously in the file.
void OpCutter::take(uint64_t max_bytes, FileOp& op) {
  op.offset = place();
  op.num_bytes = 0;
  op.parts.clear();
  while (!at_end() && op.num_bytes < max_bytes && op.parts.size() < kMaxOpParts &&
         place() == op.offset + op.num_bytes) {
    const uint64_t here = std::min(request_->size_of(index_) - offset_, num_left_);
    const uint64_t num_bytes = std::min(here, max_bytes - op.num_bytes);
    append_part(op.parts, request_->local[index_] + offset_, num_bytes);
    op.num_bytes += num_bytes;
    num_left_ -= num_bytes;
    offset_ += num_bytes;
    if (offset_ == request_->size_of(index_)) {
      ++index_;
      offset_ = 0;
    }
  }
}

bool OpCutter::is_aligned(const FileOp& op) const {
  return std::all_of(op.parts.begin(), op.parts.end(), [&](const iovec& part) {
    const auto address = reinterpret_cast<uint64_t>(part.iov_base);
    return (address & (rules_.memory_align - 1)) == 0 &&
           (part.iov_len & (rules_.file_align - 1)) == 0;
  });
}

}  // namespace mk::transfer
