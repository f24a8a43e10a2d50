// The device code of hamming_match: nvcc compiles it for the GPU, tests/emulator for the CPU.
//
// Keys are combined in `index` by atomicMin, so that several blocks can share the references of a
// query: fill `index` with kNoKey, run a match kernel, then hamming_store_kernel.
#pragma once

#include "similarity/hamming_match.h"

namespace mk::similarity {

constexpr int kMatchThreads = 128;
constexpr int kMatchTile = 128;  // references in shared memory at once

// A block's share of the work: one query per thread, and one of gridDim.y parts of their
// references.
struct MatchPart {
  int64_t query;
  TokenRange own;  // the references of the query
  TokenRange all;  // of this part, for all threads of the block

  MK_HD TokenRange own_of(TokenRange tile) const {
    return {own.begin > tile.begin ? own.begin : tile.begin,
            own.end < tile.end ? own.end : tile.end};
  }
};

inline __device__ MatchPart match_part(const HammingMatchParams& p) {
  const int64_t first = int64_t{blockIdx.x} * kMatchThreads, last = first + kMatchThreads;
  const int64_t query = first + threadIdx.x;
  TokenRange all = p.references_of(first, last < p.num_queries ? last : p.num_queries);
  const int64_t count = all.end > all.begin ? all.end - all.begin : 0;
  all.end = all.begin + count * (blockIdx.y + 1) / gridDim.y;
  all.begin += count * blockIdx.y / gridDim.y;
  const bool has_query = query < p.num_queries;
  return {query, has_query ? p.references_of(query, query + 1) : TokenRange{0, 0}, all};
}

inline __device__ void meet(const HammingMatchParams& p, int64_t query, uint64_t least) {
  if (least == kNoKey) return;
  using Word = unsigned long long;
  atomicMin(reinterpret_cast<Word*>(p.index) + query, static_cast<Word>(least));
}

// Signatures of kWords * 8 bytes, aligned to 8. All lanes of a warp read a word of a reference at
// once.
template <int kWords>
__global__ void __launch_bounds__(kMatchThreads)
    hamming_match_kernel(const __grid_constant__ HammingMatchParams p) {
  alignas(16) __shared__ uint64_t tile[kMatchTile * kWords];
  const auto* const queries = reinterpret_cast<const uint64_t*>(p.queries);
  const auto* const references = reinterpret_cast<const uint64_t*>(p.references);
  const MatchPart part = match_part(p);
  uint64_t own[kWords] = {}, least = kNoKey;
  for (int w = 0; w < kWords && part.query < p.num_queries; ++w) {
    own[w] = queries[part.query * kWords + w];
  }
  for (int64_t first = part.all.begin; first < part.all.end; first += kMatchTile) {
    const int64_t left = part.all.end - first, count = left < kMatchTile ? left : kMatchTile;
    for (int64_t i = threadIdx.x; i < count * kWords; i += kMatchThreads) {
      tile[i] = references[first * kWords + i];
    }
    __syncthreads();
    const TokenRange range = part.own_of({first, first + count});
    least = p.least_key(least, part.query, range, [&](int64_t reference) {
      int distance = 0;
      for (int w = 0; w < kWords; ++w) {
        distance += count_ones(tile[(reference - first) * kWords + w] ^ own[w]);
      }
      return static_cast<uint64_t>(distance);
    });
    __syncthreads();  // all must have read this tile before it is overwritten
  }
  meet(p, part.query, least);
}

// Signatures of any length and alignment, read in place.
__global__ void __launch_bounds__(kMatchThreads)
    hamming_match_any_kernel(const __grid_constant__ HammingMatchParams p) {
  const MatchPart part = match_part(p);
  const uint64_t least =
      p.least_key(kNoKey, part.query, part.own_of(part.all), [&](int64_t reference) {
        uint64_t distance = 0;
        for (int64_t w = 0; w < p.num_words(); ++w) {
          const uint64_t own = p.word(p.queries, part.query, w);
          distance += count_ones(p.word(p.references, reference, w) ^ own);
        }
        return distance;
      });
  meet(p, part.query, least);
}

// Replaces the keys in `index` by their results. One thread per query.
__global__ void __launch_bounds__(kMatchThreads)
    hamming_store_kernel(const __grid_constant__ HammingMatchParams p) {
  const int64_t query = int64_t{blockIdx.x} * kMatchThreads + threadIdx.x;
  if (query < p.num_queries) p.store(query, static_cast<uint64_t>(p.index[query]));
}

// Calls run(kernel) with the match kernel for these signatures.
template <class Run>
void with_match_kernel(const HammingMatchParams& p, const Run& run) {
  const auto bits =
      reinterpret_cast<uintptr_t>(p.queries) | reinterpret_cast<uintptr_t>(p.references);
  switch (bits % 8 == 0 ? p.num_bytes : 0) {
    case 8:
      return run(hamming_match_kernel<1>);
    case 16:
      return run(hamming_match_kernel<2>);
    case 32:
      return run(hamming_match_kernel<4>);
    case 64:
      return run(hamming_match_kernel<8>);
    default:
      return run(hamming_match_any_kernel);
  }
}

}  // namespace mk::similarity
