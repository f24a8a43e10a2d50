// A rule as a small postfix program, and its evaluation for one row.
//
//   const RuleRow row{words, request, position, kv_len};
//   const KeySet keys = evaluate<KeySet>(row, [&](const LeafKeys& leaf) { return set_of(leaf); });
//
// The program is int32 words. It begins with two words per request: the offset of its code, and how
// many of the request's last keys are a tail (the drafts of its trees, at most 64; these are bits,
// see KeySet). Code consists of operations, each followed by two words per parameter: its offset,
// and the distance from one request's to the next (0: shared by all). A table parameter is the
// offset of its length, which its numbers follow. mooncake_kernels/mask/program.py writes all this.
//
// csrc/mask/rule_leaves.h says what each operation sees. Layer: mask.
#pragma once

#include <cstdint>

#include "mask/rule_leaves.h"

namespace mk::mask {

constexpr int kMaxDepth = 8;  // of the stack; program.py refuses programs that need more

// The row that a rule is evaluated for.
struct RuleRow {
  const int32_t* words;
  int64_t request;
  int64_t position;
  int64_t kv_len;

  // Otherwise operations would look up what their tables do not have.
  MK_HD bool has_position() const { return position >= 0 && position < kv_len; }
  MK_HD int64_t tail_base() const { return kv_len - words[2 * request + 1]; }
};

// Runs the code: `set_of` makes a set from one operation; & and | combine two sets.
template <class Set, class SetOf>
MK_HD Set evaluate(const RuleRow& row, const SetOf& set_of) {
  Set stack[kMaxDepth];
  int top = 0;
  for (const int32_t* code = row.words + row.words[2 * row.request];;) {
    const auto op = static_cast<RuleOp>(*code++);
    if (op == RuleOp::kEnd) return stack[0];
    if (op == RuleOp::kAnd || op == RuleOp::kOr) {
      --top;
      op == RuleOp::kAnd ? stack[top - 1] &= stack[top] : stack[top - 1] |= stack[top];
      continue;
    }
    int32_t parameters[kMaxParameters];
    const int num_parameters = num_parameters_of(op);
    for (int i = 0; i < num_parameters; ++i, code += 2) {
      parameters[i] = row.words[code[0] + code[1] * row.request];
    }
    const LeafQuery query{row.words, parameters, row.position, row.kv_len};
    stack[top++] = set_of(keys_of(op, query));
  }
}

}  // namespace mk::mask
