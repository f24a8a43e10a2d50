#include "hash/block_hashes.h"

#include "common/parallel_for.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::hash {
namespace {

// A thread is worth starting for about this many tokens: some 50 us of hashing.
constexpr int64_t kTokensPerThread = int64_t{1} << 17;

int64_t num_full_blocks(const BlockHashesParams& p, int64_t request) {
  return (p.cu_seqlens[request + 1] - p.cu_seqlens[request]) / p.block_size;
}

// Each key waits for the one before, but the local hash does not: in one loop the processor
// computes the locals ahead while the chain is in flight.
void hash_request(const BlockHashesParams& p, int64_t request, uint64_t* keys) {
  const uint32_t* tokens = p.tokens + p.cu_seqlens[request];
  const int64_t num_blocks = num_full_blocks(p, request);
  bool has_previous = p.has_parent && p.has_parent[request];
  uint64_t previous = has_previous ? p.parents[request] : 0;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const uint64_t local =
        XXH3_64bits_withSeed(tokens + i * p.block_size, p.block_size * sizeof(uint32_t), p.seed);
    const uint64_t pair[2] = {previous, local};
    previous = has_previous ? XXH3_64bits_withSeed(pair, sizeof(pair), p.seed) : local;
    has_previous = true;
    keys[i] = previous;
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
