// What each rule sees from one position: at most two runs of keys, plus drafts of a tree.
//
//   const LeafKeys keys = keys_of(RuleOp::kSlidingWindow, {words, parameters, position, kv_len});
//
// The predicates match those of mooncake_kernels/mask/rules.py. Layer: mask.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk::mask {

// As in mooncake_kernels/mask/rule.py.
enum class RuleOp : int32_t {
  kEnd = 0,
  kAnd = 1,
  kOr = 2,
  kCausal = 3,
  kFull = 4,
  kSlidingWindow = 5,
  kChunkedLocal = 6,
  kSink = 7,
  kPrefixLm = 8,
  kDocuments = 9,
  kSpans = 10,
  kItems = 11,
  kTree = 12,
};

constexpr int kMaxParameters = 2;

MK_HD int num_parameters_of(RuleOp op) {
  if (op == RuleOp::kItems) return 2;
  return op == RuleOp::kCausal || op == RuleOp::kFull ? 0 : 1;
}

struct LeafQuery {
  const int32_t* words;
  const int32_t* parameters;
  int64_t position;
  int64_t kv_len;
};

// Two ascending runs, either of which may be empty or extend past the keys; and one bit per draft,
// from key `draft_base` on.
struct LeafKeys {
  int64_t begin0 = 0, end0 = 0;
  int64_t begin1 = 0, end1 = 0;
  int64_t draft_base = 0;
  uint64_t drafts = 0;
};

// The index of the last of n ascending numbers, `stride` apart, that is not above `value`; -1:
// none.
MK_HD int64_t last_not_above(const int32_t* numbers, int64_t n, int64_t stride, int64_t value) {
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    numbers[middle * stride] <= value ? low = middle + 1 : high = middle;
  }
  return low - 1;
}

MK_HD LeafKeys keys_of_document(const int32_t* table, const LeafQuery& q) {
  const int32_t n = table[0], *begins = table + 1;
  const int64_t document = last_not_above(begins, n, 1, q.position);
  return {begins[document], document + 1 < n ? begins[document + 1] : q.kv_len};
}

MK_HD LeafKeys keys_of_span(const int32_t* table, const LeafQuery& q) {
  const int32_t* spans = table + 1;
  const int64_t span = last_not_above(spans, table[0] / 2, 2, q.position);
  if (span < 0 || q.position >= spans[2 * span + 1]) return {};
  return {spans[2 * span], spans[2 * span + 1]};
}

MK_HD LeafKeys keys_of_item(int32_t prefix, const int32_t* table, const LeafQuery& q) {
  if (q.position < prefix) return {0, q.position + 1};
  const int64_t delimiter = last_not_above(table + 1, table[0], 1, q.position);
  const int64_t begin = delimiter < 0 ? prefix : table[1 + delimiter] + 1;
  return {0, prefix, begin, q.position + 1};
}

// The table holds a draft's ancestors, itself included, as 64 bits in two words.
MK_HD LeafKeys keys_of_tree(const int32_t* table, const LeafQuery& q) {
  const int64_t base = q.kv_len - table[0] / 2, draft = q.position - base;
  if (draft < 0) return {0, q.position + 1};
  const auto low = static_cast<uint32_t>(table[1 + 2 * draft]);
  const auto high = static_cast<uint32_t>(table[2 + 2 * draft]);
  return {0, base, 0, 0, base, uint64_t{high} << 32 | low};
}

MK_HD LeafKeys keys_of(RuleOp op, const LeafQuery& q) {
  const int32_t p0 = q.parameters[0];
  const int64_t behind = q.position + 1;  // end of the keys that are not later
  switch (op) {
    case RuleOp::kCausal:
      return {0, behind};
    case RuleOp::kFull:
      return {0, q.kv_len};
    case RuleOp::kSlidingWindow:
      return {behind > p0 ? behind - p0 : 0, q.kv_len};
    case RuleOp::kChunkedLocal:
      return {q.position / p0 * p0, q.position / p0 * p0 + p0};
    case RuleOp::kSink:
      return {0, p0 < behind ? p0 : behind};
    case RuleOp::kPrefixLm:
      return {0, p0 > behind ? p0 : behind};
    case RuleOp::kDocuments:
      return keys_of_document(q.words + p0, q);
    case RuleOp::kSpans:
      return keys_of_span(q.words + p0, q);
    case RuleOp::kItems:
      return keys_of_item(p0, q.words + q.parameters[1], q);
    case RuleOp::kTree:
      return keys_of_tree(q.words + p0, q);
    default:
      return {};
  }
}

}  // namespace mk::mask
