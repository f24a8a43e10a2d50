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

bool Allocator::rebuild(std::vector<Range>* used) {
  state_ = AllocatorState{};
  state_.num_units = num_units_;
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
    if (range.start < end || range.size == 0 || range.size > num_units_ ||
        range.start > num_units_ - range.size) {
      return false;
    }
    if (range.start > end) list(append(end, range.start - end));
    range.span = append(range.start, range.size);
    spans_[range.span].is_used = 1;
  }
  if (end < num_units_) list(append(end, num_units_ - end));
  return true;
}

uint32_t Allocator::allocate(uint32_t num_units) {
  if (num_units > state_.free_units) return kNone;
  const Class where = class_of(num_units);
  uint32_t span = find_in(where, num_units);
  if (span == kNone) span = find_above(where);
  if (span == kNone) return kNone;
  Span& taken = at(span);
  const uint32_t start = taken.start, size = taken.size, right = taken.right;
  expect(!taken.is_used && size >= num_units && size <= num_units_ && start <= num_units_ - size);
  unlist(span);
  if (size > num_units) {
    const uint32_t rest = new_record(start + num_units, size - num_units, span, right);
    if (right != kNone) at(right).left = rest;
    taken.right = rest;
    taken.size = num_units;
    list(rest);
  }
  taken.is_used = 1;
  return span;
}

void Allocator::release(uint32_t span) {
  Span& freed = at(span);
  const uint32_t start = freed.start, size = freed.size;
  expect(freed.is_used && size <= num_units_ && start <= num_units_ - size);
  freed.is_used = 0;
  if (const uint32_t left = freed.left; left != kNone && !at(left).is_used) {
    const Span& merged = spans_[left];
    expect(merged.right == span && merged.start < start && merged.size == start - merged.start);
    unlist(left);
    freed.start = merged.start;
    freed.size += merged.size;
    freed.left = merged.left;
    if (freed.left != kNone) at(freed.left).right = span;
    forget_record(left);
  }
  if (const uint32_t right = freed.right; right != kNone && !at(right).is_used) {
    const Span& merged = spans_[right];
    expect(merged.left == span && merged.start == start + size &&
           merged.size <= num_units_ - merged.start);
    unlist(right);
    freed.size += merged.size;
    freed.right = merged.right;
    if (freed.right != kNone) at(freed.right).left = span;
    forget_record(right);
  }
  list(span);
}

uint32_t Allocator::largest_free_units() const {
  if (state_.row_bits == 0) return 0;
  const int row = highest_bit(state_.row_bits);
  expect(row < AllocatorState::kRows && state_.column_bits[row] != 0);
  const int column = highest_bit(state_.column_bits[row]);
  uint32_t largest = 0;
  uint32_t left = num_spans_;
  for (uint32_t span = state_.heads[row][column]; span != kNone; span = spans_[span].next) {
    largest = std::max(largest, at(span).size);
    expect(left-- > 0);
  }
  return largest;
}

uint32_t Allocator::find_in(Class where, uint32_t num_units) const {
  uint32_t span = state_.heads[where.row][where.column];
  for (int tries = 0; span != kNone && tries < kTries; ++tries) {
    const Span& tried = at(span);
    if (tried.size >= num_units) return span;
    span = tried.next;
  }
  return kNone;
}

uint32_t Allocator::find_above(Class where) const {
  int row = where.row;
  uint32_t columns = bits_above(state_.column_bits[row], where.column);
  if (columns == 0) {
    const uint32_t rows = bits_above(state_.row_bits, row);
    if (rows == 0) return kNone;
    row = lowest_bit(rows);
    expect(row < AllocatorState::kRows && state_.column_bits[row] != 0);
    columns = state_.column_bits[row];
  }
  const uint32_t span = state_.heads[row][lowest_bit(columns)];
  expect(span != kNone);
  return span;
}

uint32_t Allocator::new_record(uint32_t start, uint32_t size, uint32_t left, uint32_t right) {
  const uint32_t span = state_.unused_records;
  state_.unused_records = at(span).next;
  spans_[span] = Span{start, size, left, right, kNone, kNone, 0};
  return span;
}

void Allocator::forget_record(uint32_t span) {
  spans_[span].next = state_.unused_records;
  state_.unused_records = span;
}

void Allocator::list(uint32_t span) {
  Span& freed = spans_[span];
  const Class where = class_of(freed.size);
  uint32_t& head = state_.heads[where.row][where.column];
  const uint32_t next = head;
  if (next != kNone) at(next).previous = span;
  freed.previous = kNone;
  freed.next = next;
  head = span;
  state_.column_bits[where.row] |= 1u << where.column;
  state_.row_bits |= 1u << where.row;
  state_.free_units += freed.size;
  ++state_.num_free_spans;
}

void Allocator::unlist(uint32_t span) {
  const Span& taken = at(span);
  const uint32_t previous = taken.previous, next = taken.next;
  const Class where = class_of(taken.size);
  uint32_t& link = previous != kNone ? at(previous).next : state_.heads[where.row][where.column];
  expect(link == span && (next == kNone || at(next).previous == span));
  link = next;
  if (previous == kNone && next == kNone) {
    state_.column_bits[where.row] &= ~(1u << where.column);
    if (state_.column_bits[where.row] == 0) state_.row_bits &= ~(1u << where.row);
  }
  if (next != kNone) spans_[next].previous = previous;
  state_.free_units -= taken.size;
  --state_.num_free_spans;
}

}  // namespace mk::store
