#include "store/allocator.h"

#include <algorithm>

namespace mk::store {
namespace {

constexpr int kColumnBits = 5;  // log2(kColumns)

int lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }
int highest_bit(uint32_t bits) { return 31 - __builtin_clz(bits); }

// The bits above the one at `index`.
uint32_t bits_above(uint32_t bits, int index) {
  return index == 31 ? 0 : bits & (UINT32_MAX << (index + 1));
}

}  // namespace

// Row 0 has the sizes 0 to 31, one per class; row r has those of r + 5 bits.
Allocator::Class Allocator::class_of(uint32_t size) {
  if (size < AllocatorState::kColumns) return {0, static_cast<int>(size)};
  const int bit = highest_bit(size);
  const uint32_t column = (size >> (bit - kColumnBits)) & (AllocatorState::kColumns - 1);
  return {bit - kColumnBits + 1, static_cast<int>(column)};
}

bool Allocator::rebuild(uint32_t num_units, std::vector<Range>* used) {
  state_ = AllocatorState{};
  state_.num_units = num_units;
  std::fill(&state_.heads[0][0], &state_.heads[0][0] + sizeof(state_.heads) / sizeof(uint32_t),
            kNone);
  state_.unused_records = 0;
  for (uint32_t i = 0; i < num_spans_; ++i) spans_[i].next = i + 1 < num_spans_ ? i + 1 : kNone;
  uint32_t end = 0;
  uint32_t left = kNone;
  const auto append = [&](uint32_t start, uint32_t size) {
    const uint32_t span = new_record(start, size, left, kNone);
    if (left != kNone) spans_[left].right = span;
    left = span;
    end = start + size;
    return span;
  };
  for (Range& range : *used) {
    if (range.start < end || range.size == 0 || range.size > num_units ||
        range.start > num_units - range.size) {
      return false;
    }
    if (range.start > end) list(append(end, range.start - end));
    range.span = append(range.start, range.size);
    spans_[range.span].is_used = 1;
  }
  if (end < num_units) list(append(end, num_units - end));
  return true;
}

uint32_t Allocator::allocate(uint32_t num_units) {
  if (num_units > state_.free_units) return kNone;
  const Class at = class_of(num_units);
  uint32_t span = find_in(at, num_units);
  if (span == kNone) span = find_above(at);
  if (span == kNone) return kNone;
  unlist(span);
  Span& taken = spans_[span];
  if (taken.size > num_units) {
    const uint32_t rest =
        new_record(taken.start + num_units, taken.size - num_units, span, taken.right);
    if (taken.right != kNone) spans_[taken.right].left = rest;
    taken.right = rest;
    taken.size = num_units;
    list(rest);
  }
  taken.is_used = 1;
  return span;
}

void Allocator::release(uint32_t span) {
  Span& freed = spans_[span];
  freed.is_used = 0;
  if (const uint32_t left = freed.left; left != kNone && !spans_[left].is_used) {
    unlist(left);
    freed.start = spans_[left].start;
    freed.size += spans_[left].size;
    freed.left = spans_[left].left;
    if (freed.left != kNone) spans_[freed.left].right = span;
    forget_record(left);
  }
  if (const uint32_t right = freed.right; right != kNone && !spans_[right].is_used) {
    unlist(right);
    freed.size += spans_[right].size;
    freed.right = spans_[right].right;
    if (freed.right != kNone) spans_[freed.right].left = span;
    forget_record(right);
  }
  list(span);
}

uint32_t Allocator::largest_free_units() const {
  if (state_.row_bits == 0) return 0;
  const int row = highest_bit(state_.row_bits);
  const int column = highest_bit(state_.column_bits[row]);
  uint32_t largest = 0;
  for (uint32_t span = state_.heads[row][column]; span != kNone; span = spans_[span].next) {
    largest = std::max(largest, spans_[span].size);
  }
  return largest;
}

uint32_t Allocator::find_in(Class at, uint32_t num_units) const {
  uint32_t span = state_.heads[at.row][at.column];
  for (int tries = 0; span != kNone && tries < kTries; ++tries) {
    if (spans_[span].size >= num_units) return span;
    span = spans_[span].next;
  }
  return kNone;
}

uint32_t Allocator::find_above(Class at) const {
  int row = at.row;
  uint32_t columns = bits_above(state_.column_bits[row], at.column);
  if (columns == 0) {
    const uint32_t rows = bits_above(state_.row_bits, row);
    if (rows == 0) return kNone;
    row = lowest_bit(rows);
    columns = state_.column_bits[row];
  }
  return state_.heads[row][lowest_bit(columns)];
}

uint32_t Allocator::new_record(uint32_t start, uint32_t size, uint32_t left, uint32_t right) {
  const uint32_t span = state_.unused_records;
  state_.unused_records = spans_[span].next;
  spans_[span] = Span{start, size, left, right, kNone, kNone, 0};
  return span;
}

void Allocator::forget_record(uint32_t span) {
  spans_[span].next = state_.unused_records;
  state_.unused_records = span;
}

void Allocator::list(uint32_t span) {
  Span& freed = spans_[span];
  const Class at = class_of(freed.size);
  uint32_t& head = state_.heads[at.row][at.column];
  freed.previous = kNone;
  freed.next = head;
  if (head != kNone) spans_[head].previous = span;
  head = span;
  state_.column_bits[at.row] |= 1u << at.column;
  state_.row_bits |= 1u << at.row;
  state_.free_units += freed.size;
  ++state_.num_free_spans;
}

void Allocator::unlist(uint32_t span) {
  const Span& taken = spans_[span];
  const Class at = class_of(taken.size);
  if (taken.previous != kNone) {
    spans_[taken.previous].next = taken.next;
  } else {
    state_.heads[at.row][at.column] = taken.next;
    if (taken.next == kNone) state_.column_bits[at.row] &= ~(1u << at.column);
    if (state_.column_bits[at.row] == 0) state_.row_bits &= ~(1u << at.row);
  }
  if (taken.next != kNone) spans_[taken.next].previous = taken.previous;
  state_.free_units -= taken.size;
  --state_.num_free_spans;
}

}  // namespace mk::store
