// The kernels of hamming_match on the CPU, beside the host loops and the definition: every length
// of signature that has a kernel of its own and others, references in one part and in several,
// windows, ties, and queries that match nothing.
#include "emulator/cuda_on_cpu.h"
// The device code is behind what stands for CUDA.
#include <algorithm>
#include <bitset>
#include <random>
#include <tuple>
#include <vector>

#include "expect.h"
#include "similarity/hamming_match_kernel.cuh"

namespace {

using namespace mk::similarity;

struct Sizes {
  int64_t queries, references, bytes;
};

struct Matches {
  std::vector<int64_t> index;
  std::vector<int32_t> distance;
  explicit Matches(int64_t n) : index(n, 77), distance(n, 77) {}
  bool operator==(const Matches& other) const {
    return index == other.index && distance == other.distance;
  }
};

HammingMatchParams writing(HammingMatchParams p, Matches& to) {
  p.index = to.index.data();
  p.distance = to.distance.data();
  return p;
}

Matches defined(const HammingMatchParams& p) {
  Matches result(p.num_queries);
  for (int64_t i = 0; i < p.num_queries; ++i) {
    auto best = std::make_tuple(p.max_distance + 1, int64_t{0}, int64_t{-1});
    for (int64_t j = 0; j < p.num_references; ++j) {
      if (std::abs(i - j) > p.window) continue;
      int64_t distance = 0;
      for (int64_t b = 0; b < p.num_bytes; ++b) {
        const uint8_t own = p.queries[i * p.num_bytes + b];
        distance += std::bitset<8>(own ^ p.references[j * p.num_bytes + b]).count();
      }
      best = std::min(best, std::make_tuple(distance, std::abs(i - j), j));
    }
    const bool is_match = std::get<0>(best) <= p.max_distance;
    result.index[i] = std::get<2>(best);
    result.distance[i] = is_match ? static_cast<int32_t>(std::get<0>(best)) : -1;
  }
  return result;
}

// `levels` random bytes to choose from: few make many ties.
void check(Sizes n, int64_t window, int64_t max_distance, unsigned levels, unsigned parts,
           unsigned offset = 0) {
  std::mt19937 random(static_cast<unsigned>(n.queries + 3 * n.bytes) + levels);
  std::vector<uint8_t> queries(n.queries * n.bytes + offset);
  std::vector<uint8_t> references(n.references * n.bytes + offset);
  for (auto* bytes : {&queries, &references}) {
    for (uint8_t& byte : *bytes) byte = static_cast<uint8_t>(random() % levels * 41);
  }
  const HammingMatchParams p{queries.data() + offset,
                             references.data() + offset,
                             nullptr,
                             nullptr,
                             n.queries,
                             n.references,
                             n.bytes,
                             max_distance,
                             window};
  const Matches want = defined(p);
  Matches on_host(n.queries), on_device(n.queries);
  hamming_match_host(writing(p, on_host), 0, n.queries / 3);
  hamming_match_host(writing(p, on_host), n.queries / 3, n.queries);
  EXPECT(on_host == want);
  const unsigned blocks = static_cast<unsigned>(n.queries + kMatchThreads - 1) / kMatchThreads;
  const HammingMatchParams device = writing(p, on_device);
  std::fill(on_device.index.begin(), on_device.index.end(), static_cast<int64_t>(kNoKey));
  with_match_kernel(device, [&](auto kernel) {
    emu::run(kernel, {dim3(blocks, parts), kMatchThreads, parts}, device);
  });
  emu::run(hamming_store_kernel, {blocks, kMatchThreads}, device);
  EXPECT(on_device == want);
}

}  // namespace

int main() {
  constexpr int64_t kAll = kMostTokens;
  for (const int64_t bytes : {8, 16, 32, 64, 1, 5, 24, 33, 72}) {
    check({130, 300, bytes}, kAll, 8 * bytes, 256, 1);
    check({130, 300, bytes}, kAll, 8 * bytes, 2, 3);
    check({300, 130, bytes}, 40, 2 * bytes, 256, 2);
    check({260, 700, bytes}, 7, 8 * bytes, 3, 4);
  }
  check({140, 140, 32}, 0, 256, 256, 2);
  check({140, 140, 32}, 5, 0, 1, 2);         // all are equal
  check({140, 140, 32}, 5, 256, 256, 1, 1);  // at an odd address
  check({1, 1500, 16}, kAll, 128, 256, 9);
  check({200, 1, 8}, 3, 64, 256, 1);
  check({20, 0, 8}, kAll, 64, 256, 1);
  check({0, 20, 8}, kAll, 64, 256, 1);
  check({3, 40, 3000}, kAll, 24000, 256, 2);
  return failures();
}
