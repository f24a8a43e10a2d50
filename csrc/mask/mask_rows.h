// mask_rows: what each row of a batch sees under a rule, as two intervals and 64 bits.
//
//   for row: request, position = of(row); rows[row] = canonical(evaluate(rule, request, position))
//
// A row that sees more than that can hold gets intervals of kUnfit, and the caller refuses it; so
// does a row whose position is not one of its request's.
// The number of rows is that of the output: lengths are read on the device, and rows past the
// batch's last see nothing, so that a captured CUDA graph can be replayed with other lengths.
// Layer: mask. Python: mooncake_kernels/mask/build.py.
#pragma once

#include <cstdint>

#include "mask/key_set.h"
#include "mask/mask_row.h"
#include "mask/rule_program.h"

namespace mk::mask {

constexpr int32_t kUnfit = -1;

// The keys that one operation sees, cut at the tail.
MK_HD KeySet key_set(const LeafKeys& leaf, int64_t kv_len, int64_t tail_base) {
  const auto below = [&](int64_t key) {
    return static_cast<int32_t>(key < tail_base ? key : tail_base);
  };
  const uint64_t is_key = bits_between(0, kv_len - tail_base);
  KeySet set;
  set.add(below(leaf.begin0), below(leaf.end0));
  set.add(below(leaf.begin1), below(leaf.end1));
  set.tail = (bits_between(leaf.begin0 - tail_base, leaf.end0 - tail_base) |
              bits_between(leaf.begin1 - tail_base, leaf.end1 - tail_base) |
              shifted(leaf.drafts, leaf.draft_base - tail_base)) &
             is_key;
  return set;
}

struct MaskRowsParams {
  const int32_t* program;
  BatchLengths lengths;
  const int32_t* positions;  // null: each request's queries are its last positions
  int64_t num_rows;          // of the output
  int32_t* intervals;        // [num_rows, 4]
  int64_t* tail_bits;        // [num_rows]
  int32_t* tail_base;        // [num_requests]

  MK_HD RuleRow rule_row(int64_t row, int64_t request) const {
    const int64_t kv_len = lengths.kv_lens[request];
    const int64_t last = kv_len - lengths.cu_q[request + 1];
    return {program, request, positions ? positions[row] : last + row, kv_len};
  }

  MK_HD void fill_row(int64_t row) const {
    int32_t* const interval = intervals + 4 * row;
    for (int i = 0; i < 4; ++i) interval[i] = 0;
    tail_bits[row] = 0;
    if (row >= lengths.num_q()) return;
    const RuleRow rule = rule_row(row, lengths.request_of(row));
    if (!rule.has_position()) return store_unfit(interval);
    const int64_t base = rule.tail_base();
    const auto set_of = [&](const LeafKeys& leaf) { return key_set(leaf, rule.kv_len, base); };
    store(evaluate<KeySet>(rule, set_of), base, interval, tail_bits + row);
  }

  MK_HD void fill_request(int64_t request) const {
    const RuleRow rule{program, request, 0, lengths.kv_lens[request]};
    tail_base[request] = static_cast<int32_t>(rule.tail_base());
  }

 private:
  MK_HD static void store_unfit(int32_t* interval) {
    for (int i = 0; i < 4; ++i) interval[i] = kUnfit;
  }

  // The first two runs are the intervals. Runs of the tail come last, as one may continue the last
  // run below the tail.
  MK_HD static void store(const KeySet& set, int64_t base, int32_t* interval, int64_t* tail) {
    if (set.num_runs == KeySet::kUnfit || set.num_runs > 2) return store_unfit(interval);
    int32_t n = 0;
    for (; n < set.num_runs; ++n) {
      interval[2 * n] = set.runs[n].begin;
      interval[2 * n + 1] = set.runs[n].end;
    }
    uint64_t rest = set.tail;
    for (BitRuns runs(set.tail); runs.next();) {
      const auto begin = static_cast<int32_t>(base + runs.begin);
      const bool goes_on = n > 0 && interval[2 * n - 1] == begin;
      if (!goes_on && n == 2) break;
      if (!goes_on) interval[2 * n++] = begin;
      interval[2 * n - 1] = static_cast<int32_t>(base + runs.end);
      rest = runs.rest;
    }
    *tail = static_cast<int64_t>(rest);
  }
};

// Rows [begin, end), on the calling thread.
void mask_rows_host(const MaskRowsParams& params, int64_t begin, int64_t end);

// All rows and requests, in one launch on `stream` (a cudaStream_t) of the current device. Throws
// CudaError.
void launch_mask_rows(const MaskRowsParams& params, void* stream);

}  // namespace mk::mask
