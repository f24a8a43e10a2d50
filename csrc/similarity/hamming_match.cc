#include "similarity/hamming_match.h"

#include <algorithm>
#include <vector>

namespace mk::similarity {
namespace {

#define MK_INLINE __attribute__((always_inline)) inline

constexpr int64_t kQueries = 256;      // that process the same chunk of references, one by one
constexpr int64_t kChunkWords = 2048;  // 16 KiB: half of a core's L1 cache
constexpr int64_t kMostChunk = 512;    // references

// The references of a chunk that a query may match, stored by columns: the first words of all of
// them, then their second words, and so on. So one instruction compares a query with several.
struct Columns {
  TokenRange range;
  int64_t first;          // reference of the chunk
  int64_t stride;         // from one column to the next
  const uint64_t* words;  // of the first column

  MK_INLINE uint64_t distance(int64_t word, int64_t reference, uint64_t own) const {
    return count_ones(words[word * stride + reference - first] ^ own);
  }
};

class Chunk {
 public:
  explicit Chunk(const HammingMatchParams& p)
      : stride_(std::clamp<int64_t>(kChunkWords / p.num_words(), 8, kMostChunk)),
        words_(static_cast<size_t>(stride_ * p.num_words())) {}

  int64_t size() const { return stride_; }

  void load(const HammingMatchParams& p, TokenRange range) {
    range_ = range;
    for (int64_t r = range.begin; r < range.end; ++r) {
      for (int64_t w = 0; w < p.num_words(); ++w) {
        words_[w * stride_ + r - range.begin] = p.word(p.references, r, w);
      }
    }
  }

  Columns columns(TokenRange wanted) const {
    return {{std::max(wanted.begin, range_.begin), std::min(wanted.end, range_.end)},
            range_.begin,
            stride_,
            words_.data()};
  }

 private:
  int64_t stride_;
  std::vector<uint64_t> words_;
  TokenRange range_{0, 0};
};

template <int kWords>
MK_INLINE uint64_t least_key(const HammingMatchParams& p, int64_t query, const Columns& columns,
                             uint64_t least) {
  uint64_t own[kWords];
  for (int w = 0; w < kWords; ++w) own[w] = p.word(p.queries, query, w);
  return p.least_key(least, query, columns.range, [&](int64_t reference) {
    uint64_t distance = 0;
    for (int w = 0; w < kWords; ++w) distance += columns.distance(w, reference, own[w]);
    return distance;
  });
}

// For signatures of any length: word by word.
template <>
MK_INLINE uint64_t least_key<0>(const HammingMatchParams& p, int64_t query, const Columns& columns,
                                uint64_t least) {
  uint64_t distances[kMostChunk] = {};
  const TokenRange range = columns.range;
  for (int64_t w = 0; w < p.num_words(); ++w) {
    const uint64_t own = p.word(p.queries, query, w);
    for (int64_t r = range.begin; r < range.end; ++r) {
      distances[r - range.begin] += columns.distance(w, r, own);
    }
  }
  return p.least_key(least, query, range,
                     [&](int64_t reference) { return distances[reference - range.begin]; });
}

template <int kWords>
MK_INLINE void match_words(const HammingMatchParams& p, int64_t begin, int64_t end) {
  Chunk chunk(p);
  for (int64_t first = begin; first < end; first += kQueries) {
    const int64_t last = std::min(first + kQueries, end);
    uint64_t least[kQueries];
    std::fill_n(least, kQueries, kNoKey);
    const TokenRange all = p.references_of(first, last);
    for (int64_t r = all.begin; r < all.end; r += chunk.size()) {
      chunk.load(p, {r, std::min(r + chunk.size(), all.end)});
      for (int64_t query = first; query < last; ++query) {
        uint64_t& key = least[query - first];
        key = least_key<kWords>(p, query, chunk.columns(p.references_of(query, query + 1)), key);
      }
    }
    for (int64_t query = first; query < last; ++query) p.store(query, least[query - first]);
  }
}

MK_INLINE void match(const HammingMatchParams& p, int64_t begin, int64_t end) {
  switch (p.num_words()) {
    case 1:
      return match_words<1>(p, begin, end);
    case 2:
      return match_words<2>(p, begin, end);
    case 4:
      return match_words<4>(p, begin, end);
    case 8:
      return match_words<8>(p, begin, end);
    default:
      return match_words<0>(p, begin, end);
  }
}

// One source for all instruction sets: code inlined into a function is compiled for its target.
using Match = void (*)(const HammingMatchParams&, int64_t, int64_t);
#define MK_MATCH(name, target)                                                     \
  target void name(const HammingMatchParams& params, int64_t begin, int64_t end) { \
    match(params, begin, end);                                                     \
  }
MK_MATCH(match_plain, )
#if defined(__x86_64__)
MK_MATCH(match_popcnt, __attribute__((target("popcnt"))))
MK_MATCH(match_avx512,
         __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq"))))
#endif

Match best_match() {
#if defined(__x86_64__)
  const bool has_avx512 = __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && __builtin_cpu_supports("avx512vpopcntdq")) return match_avx512;
  if (__builtin_cpu_supports("popcnt")) return match_popcnt;
#endif
  return match_plain;
}

}  // namespace

void hamming_match_host(const HammingMatchParams& params, int64_t begin, int64_t end) {
  static const Match best = best_match();
  best(params, begin, end);
}

}  // namespace mk::similarity
