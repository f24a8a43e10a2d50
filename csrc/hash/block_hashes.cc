#include "hash/block_hashes.h"

#include "common/parallel_for.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::hash {
namespace {

// A thread is worth starting for about this many tokens: some 100 us of hashing.
constexpr int64_t kTokensPerThread = int64_t{1} << 17;

void hash_local(const BlockHashesParams& p, int64_t request, int64_t begin, int64_t end) {
  const uint32_t* tokens = p.tokens + p.cu_seqlens[request];
  uint64_t* keys = p.keys + p.first_block[request];
  for (int64_t i = begin; i < end; ++i) {
    keys[i] = XXH3_64bits_withSeed(tokens + i * p.block_size, p.block_size * sizeof(uint32_t),
                                   p.seed);
  }
}

void chain(const BlockHashesParams& p, int64_t request) {
  uint64_t* keys = p.keys + p.first_block[request];
  const int64_t num_blocks = p.first_block[request + 1] - p.first_block[request];
  const bool has_parent = p.has_parent && p.has_parent[request];
  for (int64_t i = has_parent ? 0 : 1; i < num_blocks; ++i) {
    const uint64_t pair[2] = {i == 0 ? p.parents[request] : keys[i - 1], keys[i]};
    keys[i] = XXH3_64bits_withSeed(pair, sizeof(pair), p.seed);
  }
}

}  // namespace

void block_hashes(const BlockHashesParams& p, int num_threads) {
  const int64_t num_tokens = p.cu_seqlens[p.num_requests] - p.cu_seqlens[0];
  const int64_t useful_threads = std::max<int64_t>(1, num_tokens / kTokensPerThread);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads, useful_threads));
  // The local hashes of even one long request are independent of each other; its chain is not,
  // but it hashes only 16 bytes a block.
  const int64_t num_blocks = p.first_block[p.num_requests] - p.first_block[0];
  parallel_for(num_blocks, threads, [&p](int64_t begin, int64_t end) {
    const int64_t* const first = p.first_block;
    int64_t request = std::upper_bound(first, first + p.num_requests + 1, begin) - first - 1;
    for (; request < p.num_requests && first[request] < end; ++request) {
      hash_local(p, request, std::max(begin, first[request]) - first[request],
                 std::min(end, first[request + 1]) - first[request]);
    }
  });
  parallel_for(p.num_requests, threads, [&p](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) chain(p, request);
  });
}

}  // namespace mk::hash
