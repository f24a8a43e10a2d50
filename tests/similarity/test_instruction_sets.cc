// hamming_match by each instruction set that this processor has: all give the same. Which is right
// is tested by test_hamming_match.py, for the one that is chosen here.
#include <cstdio>
#include <random>
#include <vector>

#include "expect.h"
// Not linked, for what it calls only one of is in its nameless namespace.
#include "similarity/hamming_match.cc"

namespace {

using namespace mk::similarity;

struct Results {
  std::vector<int64_t> index;
  std::vector<int32_t> distance;
};

Results matched(Match match, HammingMatchParams p) {
  Results results{std::vector<int64_t>(p.num_queries, 77), std::vector<int32_t>(p.num_queries, 77)};
  p.index = results.index.data();
  p.distance = results.distance.data();
  match(p, 0, p.num_queries / 2);
  match(p, p.num_queries / 2, p.num_queries);
  return results;
}

// The references that are found are checked to be as far as is said.
void check(Match match, int64_t num_bytes, int64_t window, int64_t max_distance) {
  constexpr int64_t kNumQueries = 300, kNumReferences = 1100;
  std::mt19937 random(static_cast<unsigned>(num_bytes));
  std::vector<uint8_t> queries(kNumQueries * num_bytes), references(kNumReferences * num_bytes);
  for (uint8_t& byte : queries) byte = static_cast<uint8_t>(random());
  for (uint8_t& byte : references) byte = static_cast<uint8_t>(random());
  const HammingMatchParams p{queries.data(), references.data(), nullptr,      nullptr, kNumQueries,
                             kNumReferences, num_bytes,         max_distance, window};
  const Results results = matched(match, p), plain = matched(match_plain, p);
  EXPECT(results.index == plain.index);
  EXPECT(results.distance == plain.distance);
  for (int64_t i = 0; i < kNumQueries; ++i) {
    int64_t distance = 0;
    for (int64_t w = 0; w < p.num_words() && results.index[i] >= 0; ++w) {
      distance +=
          mk::count_ones(p.word(p.queries, i, w) ^ p.word(p.references, results.index[i], w));
    }
    EXPECT(results.distance[i] == (results.index[i] < 0 ? -1 : distance));
  }
}

void check(const char* name, Match match) {
  std::printf("%s\n", name);
  for (const int64_t num_bytes : {1, 8, 16, 24, 32, 61, 64, 100}) {
    check(match, num_bytes, kMostTokens, 8 * num_bytes);
    check(match, num_bytes, 20, 3 * num_bytes);
    check(match, num_bytes, 0, 8 * num_bytes);
  }
}

}  // namespace

int main() {
  check("plain", match_plain);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("popcnt")) check("popcnt", match_popcnt);
  if (best_match() == match_avx512) check("avx512", match_avx512);
#endif
  return failures();
}
