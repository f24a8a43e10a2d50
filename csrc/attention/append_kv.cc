#include "attention/append_kv.h"

#include <cstring>
#include <vector>

#include "common/element_rows.h"

namespace mk::attention {

void append_rows_host(const AppendParams& p, int64_t begin, int64_t end) {
  const RowFunctions& functions = RowFunctions::best();
  const bool is_copy = p.src_type == p.cache_type && !p.scales && !p.rotation.cos_sin;
  const auto row_bytes = static_cast<size_t>(p.dim * size_of(p.cache_type));
  std::vector<float> values(static_cast<size_t>(p.dim));
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = p.slots[i];
    if (slot < 0) continue;
    char* const token =
        p.cache + slot / p.block_size * p.block_stride + slot % p.block_size * p.token_stride;
    for (int64_t head = 0; head < p.num_heads; ++head) {
      const char* const from = p.src + i * p.src_token_stride + head * p.src_head_stride;
      char* const to = token + head * p.head_stride;
      if (is_copy) {
        std::memcpy(to, from, row_bytes);
        continue;
      }
      functions.load(p.src_type, from, p.dim, values.data());
      const Rotation& rotation = p.rotation;
      if (rotation.cos_sin) functions.rotate(rotation, rotation.of(i), values.data());
      if (p.scales) functions.divide(values.data(), p.dim, p.scales[head]);
      functions.store(p.cache_type, values.data(), p.dim, to);
    }
  }
}

}  // namespace mk::attention
