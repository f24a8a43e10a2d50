#include "attention/merge_attention.h"

#include <algorithm>

#include "common/element_rows.h"

namespace mk::attention {

void merge_attention_host(const MergeAttentionParams& p, int64_t begin, int64_t end) {
  constexpr int64_t kPart = 256;
  const RowFunctions& functions = RowFunctions::best();
  const int64_t itemsize = size_of(p.type);
  for (int64_t row = begin; row < end; ++row) {
    const MergeAttentionParams::Merged merged = p.merged(row);
    p.lse[row] = p.merged_lse(merged);
    for (int64_t d = 0; d < p.dim; d += kPart) {
      const int64_t count = std::min(kPart, p.dim - d);
      float sums[kPart] = {}, values[kPart];
      for (int64_t part = 0; part < p.num_parts; ++part) {
        const float weight = p.weight(part, row, merged);
        if (weight == 0) continue;
        functions.load(p.type, p.outs + (p.first(part, row) + d) * itemsize, count, values);
        for (int64_t i = 0; i < count; ++i) sums[i] += weight * values[i];
      }
      functions.store(p.type, sums, count, p.out + (row * p.dim + d) * itemsize);
    }
  }
}

}  // namespace mk::attention
