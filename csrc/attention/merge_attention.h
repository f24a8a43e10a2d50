// merge_attention: combines attention over parts of the keys into attention over all of them, from
// the parts' outputs and log-sum-exps.
//
//   merge_attention_host(params, 0, params.num_rows);  // or launch_merge_attention(params, stream)
//
// The parts of a query may be splits of its keys, blocks on other instances (DistAttention), or a
// shared prefix and the rest. A part whose lse is -inf has no keys: its values are not read.
// Layer: attention. Python: mooncake_kernels/attention/merge.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/element.h"
#include "common/hd.h"

namespace mk::attention {

constexpr float kLog2OfE = 0x1.715476p+0f;

struct MergeAttentionParams {
  const char* outs;   // [num_parts][num_rows][dim]
  const float* lses;  // [num_parts][num_rows]
  char* out;          // [num_rows][dim]
  float* lse;         // [num_rows]
  int64_t num_parts;
  int64_t num_rows;
  int64_t dim;
  ElementType type;
  bool is_log2;  // lse are base-2 logarithms; otherwise natural ones

  MK_HD float exponent(float x) const { return exp2f(is_log2 ? x : x * kLog2OfE); }
  MK_HD float logarithm(float x) const { return is_log2 ? log2f(x) : logf(x); }
  MK_HD float part_lse(int64_t part, int64_t row) const { return lses[part * num_rows + row]; }

  // The log-sum-exp of all parts of a row is largest + logarithm(sum).
  struct Merged {
    float largest;
    float sum;  // of exponent(lse - largest)
  };

  MK_HD Merged merged(int64_t row) const {
    float largest = -INFINITY, sum = 0;
    for (int64_t part = 0; part < num_parts; ++part) {
      const float lse = part_lse(part, row);
      largest = lse > largest || lse != lse ? lse : largest;  // NaN stays
    }
    if (largest == -INFINITY || largest == INFINITY) return {largest, 1};  // no NaN of a difference
    for (int64_t part = 0; part < num_parts; ++part) {
      sum += exponent(part_lse(part, row) - largest);
    }
    return {largest, sum};
  }

  MK_HD float merged_lse(const Merged& merged) const {
    return merged.largest + logarithm(merged.sum);
  }

  // The weight of a part of a row; 0 if it has no keys. Not from the merged lse, which is rounded:
  // the larger it is, the more.
  MK_HD float weight(int64_t part, int64_t row, const Merged& merged) const {
    const float lse = part_lse(part, row);
    return lse == -INFINITY ? 0.f : exponent(lse - merged.largest) / merged.sum;
  }

  // The index in `outs` of a row's first value.
  MK_HD int64_t first(int64_t part, int64_t row) const { return (part * num_rows + row) * dim; }
};

// Rows [begin, end).
void merge_attention_host(const MergeAttentionParams& params, int64_t begin, int64_t end);

// Queued on the stream, a cudaStream_t.
void launch_merge_attention(const MergeAttentionParams& params, void* stream);

}  // namespace mk::attention
