#include "hash/block_hashes.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/parallel_for.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::hash {
namespace {

// The number of tokens for which a thread is worth starting: about 50 us of hashing.
constexpr int64_t kTokensPerThread = int64_t{1} << 17;

int64_t num_full_blocks(const BlockHashesParams& p, int64_t request) {
  return (p.cu_seqlens[request + 1] - p.cu_seqlens[request]) / p.block_size;
}

// Each key depends on the previous one, but the local hash does not: in one loop the processor
// computes local hashes ahead while the chain is in flight. For the block sizes that engines use,
// `Size` is an integral_constant, so that the compiler resolves the hash's dispatch on length.
template <class Size>
void hash_request(const BlockHashesParams& p, int64_t request, Size block_size, uint64_t* keys) {
  const uint32_t* tokens = p.tokens + p.cu_seqlens[request];
  const int64_t num_blocks = num_full_blocks(p, request);
  if (num_blocks == 0) return;
  const auto local = [&](int64_t i) {
    return XXH3_64bits_withSeed(tokens + i * block_size, block_size * sizeof(uint32_t), p.seed);
  };
  const auto chain = [&](uint64_t previous, int64_t i) {
    const uint64_t pair[2] = {previous, local(i)};
    return XXH3_64bits_withSeed(pair, sizeof(pair), p.seed);
  };
  const bool has_parent = p.has_parent && p.has_parent[request];
  keys[0] = has_parent ? chain(p.parents[request], 0) : local(0);
  for (int64_t i = 1; i < num_blocks; ++i) keys[i] = chain(keys[i - 1], i);
}

void hash_request(const BlockHashesParams& p, int64_t request, uint64_t* keys) {
  switch (p.block_size) {
    case 16:
      return hash_request(p, request, std::integral_constant<int64_t, 16>{}, keys);
    case 32:
      return hash_request(p, request, std::integral_constant<int64_t, 32>{}, keys);
    case 64:
      return hash_request(p, request, std::integral_constant<int64_t, 64>{}, keys);
    default:
      return hash_request(p, request, p.block_size, keys);
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
  std::vector<uint64_t*> request_keys;
  for (int64_t request = 0; request < p.num_requests; ++request) {
    request_keys.push_back(keys);
    keys += num_full_blocks(p, request);
  }
  const int64_t* const starts = p.cu_seqlens;
  const int64_t num_tokens = starts[p.num_requests];
  const int64_t useful_threads = std::max<int64_t>(1, num_tokens / kTokensPerThread);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads, useful_threads));
  // A thread takes the requests that start in its share of the tokens.
  parallel_for(num_tokens, threads, [&](int64_t begin, int64_t end) {
    const int64_t* start = std::lower_bound(starts, starts + p.num_requests, begin);
    for (; start < starts + p.num_requests && *start < end; ++start) {
      hash_request(p, start - starts, request_keys[start - starts]);
    }
  });
}

}  // namespace mk::hash
