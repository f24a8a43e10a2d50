// block_hashes: keys for blocks of tokens, chained so that a key identifies its whole prefix.
//
//   local_i = XXH3_64(tokens of block i as little-endian uint32, seed_of("mk.block"))
//   key_i   = XXH3_64(parent_i || local_i || extra_i || has_i, seed_of("mk.chain"))
//
// of four little-endian uint64: parent_i is key_{i-1}, or the request's parent for its first block;
// extra_i the hash of what else the block's KV depends on; bit 0 of has_i says whether there is a
// parent, bit 1 whether there is an extra_i, and what is not there is 0. A purpose has a seed of
// its own, seed_of(purpose) = XXH3_64(purpose || seed), so no input of one is an input of another,
// of the same or of another caller's seed.
//
// Layer: hash, no torch. Python: mooncake_kernels/hashing.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mk::hash {

struct BlockHashesParams {
  const uint32_t* tokens;     // [cu_seqlens[num_requests]]
  const int64_t* cu_seqlens;  // [num_requests + 1]: request r is tokens[cu[r]] .. tokens[cu[r + 1]]
  const uint64_t* parents;    // [num_requests]: the key before a request's first; may be null
  const uint8_t* has_parent;  // [num_requests]; null together with `parents`
  const uint64_t* extras;     // [num_block_hashes]: hash_extra of each block; may be null
  const uint8_t* has_extra;   // [num_block_hashes]; null together with `extras`
  int64_t num_requests;
  int64_t block_size;  // tokens
  uint64_t seed;
};

// The number of keys: a request's last, partial block gets none.
int64_t num_block_hashes(const BlockHashesParams& params);

// Writes the keys of all requests one after another, on up to `num_threads` threads.
void block_hashes(const BlockHashesParams& params, uint64_t* keys, int num_threads);

// The hash of the encoded extra keys of a block, for the same seed: XXH3_64(bytes,
// seed_of("mk.extra")).
uint64_t hash_extra(const void* bytes, size_t num_bytes, uint64_t seed);

}  // namespace mk::hash
