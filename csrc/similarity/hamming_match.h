// hamming_match: for each query, the reference whose signature differs in the fewest bits.
//
//   hamming_match_host(params, 0, params.num_queries);  // or launch_hamming_match(params, stream)
//
// Pairs are compared by one integer, their key: the distance in the high bits and, below it, the
// reference's offset from the query in the order of ties: 0, -1, 1, -2, 2 and so on. The smallest
// key is the match, in whatever order and by whichever thread it is found.
//
// Layer: similarity. Python: mooncake_kernels/similarity.py.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/hd.h"
#include "common/math.h"

namespace mk::similarity {

constexpr int kPlaceBits = 40;
constexpr int64_t kMostTokens = int64_t{1} << 37;       // so places are below 2^38,
constexpr int64_t kMostBytes = (int64_t{1} << 20) - 1;  // and distances below 2^23
constexpr uint64_t kNoKey = ~uint64_t{0};

struct TokenRange {
  int64_t begin;
  int64_t end;
};

struct HammingMatchParams {
  const uint8_t* queries;     // [num_queries][num_bytes]
  const uint8_t* references;  // [num_references][num_bytes]
  int64_t* index;             // [num_queries]
  int32_t* distance;          // [num_queries]
  int64_t num_queries;
  int64_t num_references;
  int64_t num_bytes;
  int64_t max_distance;  // at most 8 * num_bytes
  int64_t window;        // at most kMostTokens

  MK_HD int64_t num_words() const { return (num_bytes + 7) / 8; }

  // 8 bytes of a signature; the last word is padded with zeros.
  MK_HD uint64_t word(const uint8_t* signatures, int64_t token, int64_t index) const {
    const int64_t first = 8 * index, left = num_bytes - first;
    uint64_t result = 0;
    memcpy(&result, signatures + token * num_bytes + first, left < 8 ? left : 8);
    return result;
  }

  // The references that any of the queries [begin, end) may match; none if its end is not after its
  // begin.
  MK_HD TokenRange references_of(int64_t begin, int64_t end) const {
    const int64_t first = begin > window ? begin - window : 0, last = end + window;
    return {first, last < num_references ? last : num_references};
  }

  static MK_HD uint64_t key(int64_t query, int64_t reference, uint64_t distance) {
    const int64_t offset = reference - query;
    return distance << kPlaceBits | static_cast<uint64_t>((offset * 2) ^ (offset >> 63));
  }

  // The smallest of `least` and the keys of a query with the references of a range.
  template <class DistanceTo>
  MK_HD uint64_t least_key(uint64_t least, int64_t query, TokenRange range,
                           const DistanceTo& distance_to) const {
    for (int64_t reference = range.begin; reference < range.end; ++reference) {
      const uint64_t other = key(query, reference, distance_to(reference));
      least = other < least ? other : least;
    }
    return least;
  }

  // Stores the result that the smallest key of a query, or kNoKey, stands for.
  MK_HD void store(int64_t query, uint64_t key) const {
    const int64_t bits = static_cast<int64_t>(key >> kPlaceBits);
    const int64_t place = static_cast<int64_t>(key & ((uint64_t{1} << kPlaceBits) - 1));
    const bool is_match = bits <= max_distance;
    index[query] = is_match ? query + ((place >> 1) ^ -(place & 1)) : -1;
    distance[query] = is_match ? static_cast<int32_t>(bits) : -1;
  }
};

// Queries [begin, end), on the calling thread.
void hamming_match_host(const HammingMatchParams& params, int64_t begin, int64_t end);

// All queries, on `stream` (a cudaStream_t) of the current device.
void launch_hamming_match(const HammingMatchParams& params, void* stream);

}  // namespace mk::similarity
