// block_hashes: keys for blocks of tokens, chained so that a key identifies its whole prefix.
//
//   local_i = XXH3_64(tokens of block i as little-endian uint32, seed)
//   key_0   = local_0                                        (of a request without a parent)
//   key_i   = XXH3_64(key_{i-1} || local_i, seed)            (two little-endian uint64)
//
// Dynamo's block manager and Mooncake's Conductor use this same chain. Layer: hash, no torch.
// Python: mooncake_kernels/hashing.py.
#pragma once

#include <cstdint>

namespace mk::hash {

struct BlockHashesParams {
  const uint32_t* tokens;     // [cu_seqlens[num_requests]]
  const int64_t* cu_seqlens;  // [num_requests + 1]: request r is tokens[cu[r]] .. tokens[cu[r + 1]]
  const uint64_t* parents;    // [num_requests]: the key before a request's first; may be null
  const uint8_t* has_parent;  // [num_requests]; null together with `parents`
  int64_t num_requests;
  int64_t block_size;  // tokens
  uint64_t seed;
};

// The number of keys: a request's last, partial block gets none.
int64_t num_block_hashes(const BlockHashesParams& params);

// Writes the keys of all requests one after another, on up to `num_threads` threads.
void block_hashes(const BlockHashesParams& params, uint64_t* keys, int num_threads);

}  // namespace mk::hash
