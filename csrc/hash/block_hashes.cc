#include "hash/block_hashes.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/parallel_for.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::hash {
namespace {

// The number of tokens for which a thread is worth starting: about 50 us of hashing.
constexpr int64_t kTokensPerThread = int64_t{1} << 17;

constexpr uint64_t kHasParent = 1, kHasExtra = 2;

int64_t num_full_blocks(const BlockHashesParams& p, int64_t request) {
  return (p.cu_seqlens[request + 1] - p.cu_seqlens[request]) / p.block_size;
}

// The seed of one purpose, of which no caller's seed makes that of another.
uint64_t seed_of(const char (&purpose)[9], uint64_t seed) {
  uint64_t words[2] = {0, seed};
  std::memcpy(words, purpose, sizeof(uint64_t));
  return XXH3_64bits(words, sizeof(words));
}

// Made once a call: for blocks of more than 240 bytes XXH3 would derive its secret for each.
struct Seeds {
  explicit Seeds(uint64_t seed)
      : block(seed_of("mk.block", seed)), chain(seed_of("mk.chain", seed)) {
    XXH3_generateSecret_fromSeed(block_secret, block);
  }

  uint64_t block;
  uint64_t chain;
  XXH_ALIGN(XXH_SEC_ALIGN) unsigned char block_secret[XXH_SECRET_DEFAULT_SIZE];
};

// Each key depends on the previous one, but the local hash does not: in one loop the processor
// computes local hashes ahead while the chain is in flight. For the block sizes that engines use,
// `Size` is an integral_constant, so that the compiler resolves the hash's dispatch on length; and
// without extra keys half of a link is constant, and hashed once.
template <class Size>
void hash_request(const BlockHashesParams& p, const Seeds& seeds, int64_t request, Size block_size,
                  int64_t first_block, uint64_t* keys) {
  const uint32_t* tokens = p.tokens + p.cu_seqlens[request];
  const int64_t num_blocks = num_full_blocks(p, request);
  if (num_blocks == 0) return;
  keys += first_block;
  const uint64_t block_seed = seeds.block, chain_seed = seeds.chain;  // which no key can alias
  const auto link = [&](uint64_t parent, int64_t i, uint64_t extra, uint64_t has) {
    const uint64_t local =
        XXH3_64bits_withSecretandSeed(tokens + i * block_size, block_size * sizeof(uint32_t),
                                      seeds.block_secret, sizeof(seeds.block_secret), block_seed);
    const uint64_t words[4] = {parent, local, extra, has};
    return XXH3_64bits_withSeed(words, sizeof(words), chain_seed);
  };
  const auto link_with_extra = [&](uint64_t parent, int64_t i, uint64_t has) {
    const bool has_extra = p.extras && p.has_extra[first_block + i];
    const uint64_t extra = has_extra ? p.extras[first_block + i] : 0;
    return link(parent, i, extra, has | (has_extra ? kHasExtra : 0));
  };
  const bool has_parent = p.has_parent && p.has_parent[request];
  uint64_t key =
      link_with_extra(has_parent ? p.parents[request] : 0, 0, has_parent ? kHasParent : 0);
  keys[0] = key;
  if (p.extras) {
    for (int64_t i = 1; i < num_blocks; ++i) keys[i] = key = link_with_extra(key, i, kHasParent);
  } else {
    for (int64_t i = 1; i < num_blocks; ++i) keys[i] = key = link(key, i, 0, kHasParent);
  }
}

void hash_request(const BlockHashesParams& p, const Seeds& seeds, int64_t request,
                  int64_t first_block, uint64_t* keys) {
  const auto run = [&](auto block_size) {
    hash_request(p, seeds, request, block_size, first_block, keys);
  };
  switch (p.block_size) {
    case 16:
      return run(std::integral_constant<int64_t, 16>{});
    case 32:
      return run(std::integral_constant<int64_t, 32>{});
    case 64:
      return run(std::integral_constant<int64_t, 64>{});
    default:
      return run(p.block_size);
  }
}

}  // namespace

int64_t num_block_hashes(const BlockHashesParams& p) {
  int64_t count = 0;
  for (int64_t request = 0; request < p.num_requests; ++request) {
    count += num_full_blocks(p, request);
  }
  return count;
}

void block_hashes(const BlockHashesParams& p, uint64_t* keys, int num_threads) {
  const Seeds seeds(p.seed);
  std::vector<int64_t> first_blocks;
  int64_t num_blocks = 0;
  for (int64_t request = 0; request < p.num_requests; ++request) {
    first_blocks.push_back(num_blocks);
    num_blocks += num_full_blocks(p, request);
  }
  const int64_t* const starts = p.cu_seqlens;
  const int64_t num_tokens = starts[p.num_requests];
  const int64_t useful_threads = std::max<int64_t>(1, num_tokens / kTokensPerThread);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads, useful_threads));
  // A thread takes the requests that start in its share of the tokens.
  parallel_for(num_tokens, threads, [&](int64_t begin, int64_t end) {
    const int64_t* start = std::lower_bound(starts, starts + p.num_requests, begin);
    for (; start < starts + p.num_requests && *start < end; ++start) {
      hash_request(p, seeds, start - starts, first_blocks[start - starts], keys);
    }
  });
}

uint64_t hash_extra(const void* bytes, size_t num_bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes, num_bytes, seed_of("mk.extra", seed));
}

}  // namespace mk::hash
