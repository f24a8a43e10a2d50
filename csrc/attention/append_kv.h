// Writes new keys or values to their slots of a paged cache.
//
//   append_rows_host(params, 0, params.num_tokens);   // once for keys, once for values
//
// Layer: attention. Python: mooncake_kernels/attention/append.py.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/rotation.h"

namespace mk::attention {

struct AppendParams {
  const char* src;  // [token][head][dim], strides in bytes, dim packed
  ElementType src_type;
  int64_t src_token_stride;
  int64_t src_head_stride;
  char* cache;  // [block][token][head][dim], likewise
  ElementType cache_type;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t block_size;
  int64_t num_heads;
  int64_t dim;
  int64_t num_tokens;
  const int64_t* slots;  // [num_tokens], checked; negative: skipped
  const float* scales;   // [num_heads], rows are divided by them; null: 1
  Rotation rotation;     // its tables are per token
};

// Tokens [begin, end).
void append_rows_host(const AppendParams& params, int64_t begin, int64_t end);

}  // namespace mk::attention
