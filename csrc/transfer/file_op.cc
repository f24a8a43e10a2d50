#include "transfer/file_op.h"

#include <algorithm>

namespace mk::transfer {

bool OpCutter::next(FileOp& op) {
  op.num_bytes = 0;
  op.parts.clear();
  while (!at_end() && op.num_bytes < kMaxOpBytes && op.parts.size() < kMaxOpParts) {
    const Step step = look();
    if (op.num_bytes == 0) {
      op.direct = step.direct;
      op.offset = step.offset;
    } else if (step.direct != op.direct || step.offset != op.offset + op.num_bytes) {
      break;
    }
    const uint64_t num_bytes = std::min(step.num_bytes, kMaxOpBytes - op.num_bytes);
    append_part(op.parts, step.memory, num_bytes);
    op.num_bytes += num_bytes;
    skip(num_bytes);
  }
  return op.num_bytes > 0;
}

OpCutter::Step OpCutter::look() const {
  const uint64_t memory = request_->local[index_] + offset_;
  const uint64_t begin = request_->remote[index_] + offset_;
  const uint64_t end = begin + std::min(request_->size_of(index_) - offset_, num_left_);
  if (rules_.file_align > 0) {
    const uint64_t mask = rules_.file_align - 1;
    const uint64_t first = (begin + mask) & ~mask, last = end & ~mask;
    const uint64_t address = memory + (first - begin);
    if (first < last && (address & (rules_.memory_align - 1)) == 0) {
      if (begin < first) return {false, memory, begin, first - begin};
      return {true, memory, begin, last - begin};
    }
  }
  return {false, memory, begin, end - begin};
}

void OpCutter::skip(uint64_t num_bytes) {
  num_left_ -= num_bytes;
  offset_ += num_bytes;
  if (offset_ == request_->size_of(index_)) {
    ++index_;
    offset_ = 0;
  }
}

}  // namespace mk::transfer
