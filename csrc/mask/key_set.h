// The set of keys of one row during the evaluation of a rule: a few runs below tail_base, then
// bits.
//
//   KeySet set;
//   set.add(0, 4);
//   set.add(90, 100);
//   set &= other;
//
// & and | are exact as long as the result has at most kMaxRuns runs; a set with more is marked
// unfit and stays so. Layer: mask.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk::mask {

constexpr int kMaxRuns = 8;

struct Run {
  int32_t begin;
  int32_t end;
};

struct KeySet {
  static constexpr int kUnfit = -1;

  int num_runs = 0;  // ascending, separated, not empty; or kUnfit
  Run runs[kMaxRuns];
  uint64_t tail = 0;

  // Adds a run that begins no earlier than those present; an empty one adds nothing.
  MK_HD void add(int32_t begin, int32_t end) {
    if (num_runs == kUnfit || begin >= end) return;
    if (num_runs > 0 && begin <= runs[num_runs - 1].end) {
      if (end > runs[num_runs - 1].end) runs[num_runs - 1].end = end;
    } else if (num_runs == kMaxRuns) {
      num_runs = kUnfit;
    } else {
      runs[num_runs++] = {begin, end};
    }
  }

  MK_HD KeySet& operator&=(const KeySet& other) {
    KeySet result;
    result.tail = tail & other.tail;
    for (int i = 0, j = 0; i < num_runs && j < other.num_runs;) {
      const Run a = runs[i], b = other.runs[j];
      result.add(a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end);
      a.end < b.end ? ++i : ++j;
    }
    if (num_runs == kUnfit || other.num_runs == kUnfit) result.num_runs = kUnfit;
    return *this = result;
  }

  MK_HD KeySet& operator|=(const KeySet& other) {
    KeySet result;
    result.tail = tail | other.tail;
    for (int i = 0, j = 0; i < num_runs || j < other.num_runs;) {
      const bool mine =
          j >= other.num_runs || (i < num_runs && runs[i].begin <= other.runs[j].begin);
      const Run next = mine ? runs[i++] : other.runs[j++];
      result.add(next.begin, next.end);
    }
    if (num_runs == kUnfit || other.num_runs == kUnfit) result.num_runs = kUnfit;
    return *this = result;
  }
};

}  // namespace mk::mask
