// Allocator: tracks which parts of a pool's memory are in use, in O(1) per call.
//
//   Allocator allocator(&state, spans, num_spans, num_units, &damage);  // in shared memory, too
//   allocator.rebuild(&no_ranges);
//   const uint32_t span = allocator.allocate(num_units);    // kNone: there is no room
//   use(allocator.start(span));
//   allocator.release(span);
//
// A two-level segregated fit over numbers, not over memory: free spans are listed by size class, 32
// classes per power of two, and two words of bits find the first class that has one. (M. Masmano et
// al., "TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004.) The memory itself
// is never touched, so it may belong to a NIC or a GPU. Adjacent free spans are always merged: u
// used spans have at most u + 1 free ones around them, so 2 u + 1 records suffice. The unit is the
// pool's alignment. State that contradicts itself is reported as damage. Layer: store. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "store/damage.h"

namespace mk::store {

constexpr uint32_t kNone = UINT32_MAX;

// Records of spans and the lists they are in, as offsets: valid wherever they are mapped.
struct Span {
  uint32_t start;
  uint32_t size;
  uint32_t left;  // neighbours in memory
  uint32_t right;
  uint32_t previous;  // in the free list of its class; an unused record has only `next`
  uint32_t next;
  uint32_t is_used;
};

struct AllocatorState {
  static constexpr int kRows = 28;
  static constexpr int kColumns = 32;

  uint32_t num_units;
  uint32_t free_units;
  uint32_t num_free_spans;
  uint32_t unused_records;
  uint32_t row_bits;  // rows, and classes below them, that have a free span
  uint32_t column_bits[kRows];
  uint32_t heads[kRows][kColumns];
};

struct Range {
  uint32_t start;
  uint32_t size;
  uint32_t span;  // set by rebuild()
};

class Allocator {
 public:
  Allocator(AllocatorState* state, Span* spans, uint32_t num_spans, uint32_t num_units,
            const Damage* damage)
      : state_(*state),
        spans_(spans),
        num_spans_(num_spans),
        num_units_(num_units),
        damage_(*damage) {}

  // Rebuilds from the sorted ranges in use; returns whether they are disjoint and within num_units.
  bool rebuild(std::vector<Range>* used);

  // Returns a span of `num_units`, which must not be 0, or kNone. An exact or close fit is looked
  // for among the first kTries of its own class; otherwise a span of a larger class is split.
  uint32_t allocate(uint32_t num_units);
  void release(uint32_t span);

  uint32_t start(uint32_t span) const { return at(span).start; }
  uint32_t size(uint32_t span) const { return at(span).size; }
  uint32_t free_units() const { return state_.free_units; }
  uint32_t num_free_spans() const { return state_.num_free_spans; }
  uint32_t largest_free_units() const;  // walks one list

 private:
  static constexpr int kTries = 8;

  struct Class {
    int row;
    int column;
  };
  static Class class_of(uint32_t size);

  Span& at(uint32_t span) const {
    if (span >= num_spans_) damage_.report("its allocator's lists lead out of them");
    return spans_[span];
  }
  void expect(bool condition) const {
    if (!condition) damage_.report("its allocator's records contradict each other");
  }
  uint32_t find_in(Class where, uint32_t num_units) const;
  uint32_t find_above(Class where) const;
  uint32_t new_record(uint32_t start, uint32_t size, uint32_t left, uint32_t right);
  void forget_record(uint32_t span);
  void list(uint32_t span);
  void unlist(uint32_t span);

  AllocatorState& state_;
  Span* const spans_;
  const uint32_t num_spans_;
  const uint32_t num_units_;
  const Damage& damage_;
};

}  // namespace mk::store
