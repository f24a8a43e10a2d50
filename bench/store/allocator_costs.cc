// What the pool's allocator costs, and how full it gets. bench_allocator.py builds and runs it:
//
//   allocator_costs time <objects> <percent full> <rounds>
//       a round frees 1 % of the objects, at random, and allocates as many of the same sizes, in
//       another order; prints the medians of the nanoseconds of one call: release, allocate; and
//       how many in a million of the allocations found no gap
//   allocator_costs fill <mix> <bytes of the pool> <random|oldest> <allocations>
//       prints how full a pool is when it first refuses an allocation; then goes on for that many
//       allocations, freeing an object at a time where there is no gap, and prints how full it was
//       where there was none: the median, and the lowest percentile; and the same after each
//       allocation
//
// How full: bytes asked for, of the pool's.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "store/allocator.h"

using mk::store::Allocator;
using mk::store::AllocatorState;
using mk::store::kNone;
using mk::store::Range;
using mk::store::Span;

namespace {

constexpr uint64_t kUnit = 4096;  // a pool's alignment, unless it is made with another
constexpr uint64_t kKiB = 1 << 10, kMiB = 1 << 20;

using Random = std::mt19937_64;

uint64_t between(uint64_t low, uint64_t high, Random& random) {
  return std::uniform_int_distribution<uint64_t>(low, high)(random);
}

// Of blocks of 16 tokens in bfloat16 of Llama 8B, and of a model with latents; and the pair of
// values and keys of an index that Mooncake's bench has.
constexpr uint64_t kBlocks[] = {2 * kMiB, 1098 * kKiB, 3274752, 643 * kKiB};

uint64_t draw(const std::string& mix, Random& random) {
  if (mix == "one") return kBlocks[0];
  if (mix == "blocks") return kBlocks[random() % 4];
  if (mix == "any") return between(4 * kKiB, 4 * kMiB, random);
  if (mix == "tiny-large") return random() % 10 ? 4 * kKiB : 16 * kMiB;
  if (mix == "mooncake") return between(kKiB, 64 * kMiB, random);
  std::fprintf(stderr, "no such mix: %s\n", mix.c_str());
  std::exit(2);
}

uint32_t units_of(uint64_t num_bytes) {
  return static_cast<uint32_t>((num_bytes + kUnit - 1) / kUnit);
}

struct Pool {
  Pool(uint64_t num_units, uint64_t max_objects)
      : spans(2 * max_objects + 1),
        allocator(&state, spans.data(), static_cast<uint32_t>(spans.size()),
                  static_cast<uint32_t>(num_units), &damage) {
    std::vector<Range> none;
    allocator.rebuild(&none);
  }

  const mk::store::Damage damage{"of the bench"};
  AllocatorState state;
  std::vector<Span> spans;
  Allocator allocator;
};

double median(std::vector<double> values, double rank = 0.5) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(rank * (values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

template <class Call>
double ns_each(size_t count, const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < count; ++i) call(i);
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / static_cast<double>(count);
}

void measure_time(size_t num_objects, double percent, int rounds) {
  Random random(1);
  std::vector<uint32_t> sizes(num_objects), live(num_objects);
  uint64_t used = 0;
  for (uint32_t& size : sizes) used += size = units_of(draw("any", random));
  Pool pool(static_cast<uint64_t>(static_cast<double>(used) * 100 / percent), num_objects);
  Allocator& allocator = pool.allocator;
  for (size_t i = 0; i < num_objects; ++i) live[i] = allocator.allocate(sizes[i]);
  const size_t count = num_objects / 100;
  std::vector<size_t> chosen(count), order(count);
  std::vector<double> release, allocate;
  uint64_t failed = 0;
  const int warm_up = std::max(rounds, 300);  // each object has been replaced about three times
  for (int round = 0; round < warm_up + rounds; ++round) {
    // They move to the end, so that none is chosen twice.
    for (size_t i = 0; i < count; ++i) {
      const size_t at = random() % (num_objects - i), last = num_objects - 1 - i;
      std::swap(live[at], live[last]);
      std::swap(sizes[at], sizes[last]);
    }
    const size_t first = num_objects - count;
    const double release_ns = ns_each(count, [&](size_t i) {
      if (live[first + i] != kNone) allocator.release(live[first + i]);
    });
    std::shuffle(sizes.begin() + static_cast<std::ptrdiff_t>(first), sizes.end(), random);
    const double allocate_ns =
        ns_each(count, [&](size_t i) { live[first + i] = allocator.allocate(sizes[first + i]); });
    if (round < warm_up) continue;
    release.push_back(release_ns);
    allocate.push_back(allocate_ns);
    failed += static_cast<uint64_t>(
        std::count(live.begin() + static_cast<std::ptrdiff_t>(first), live.end(), kNone));
  }
  std::printf("%.1f %.1f %.0f\n", median(release), median(allocate),
              1e6 * static_cast<double>(failed) / static_cast<double>(count * rounds));
}

struct Object {
  uint32_t span;
  uint64_t num_bytes;
};

void measure_fill(const std::string& mix, uint64_t capacity, bool oldest, size_t allocations) {
  Random random(1);
  Pool pool(capacity / kUnit, capacity / kUnit);
  std::vector<Object> live;
  size_t head = 0;  // of a queue: objects before it are gone
  uint64_t used = 0;
  double first = 0;
  std::vector<double> missing, after;
  const auto share = [&] { return static_cast<double>(used) / static_cast<double>(capacity); };
  while (after.size() < allocations) {
    const uint64_t num_bytes = draw(mix, random);
    uint32_t span = pool.allocator.allocate(units_of(num_bytes));
    if (span == kNone && first != 0) missing.push_back(share());
    if (span == kNone && first == 0) first = share();
    while (span == kNone) {
      if (!oldest) std::swap(live[head + random() % (live.size() - head)], live[head]);
      pool.allocator.release(live[head].span);
      used -= live[head++].num_bytes;
      span = pool.allocator.allocate(units_of(num_bytes));
    }
    if (head > live.size() / 2) {
      live.erase(live.begin(), live.begin() + static_cast<std::ptrdiff_t>(head));
      head = 0;
    }
    live.push_back({span, num_bytes});
    used += num_bytes;
    if (first != 0) after.push_back(share());
  }
  std::printf("%.4f %.4f %.4f %.4f %.4f\n", first, median(missing), median(missing, 0.01),
              median(after), median(after, 0.01));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && !std::strcmp(argv[1], "time")) {
    measure_time(std::strtoull(argv[2], nullptr, 10), std::atof(argv[3]), std::atoi(argv[4]));
  } else if (argc == 6 && !std::strcmp(argv[1], "fill")) {
    const bool oldest = !std::strcmp(argv[4], "oldest");
    measure_fill(argv[2], std::strtoull(argv[3], nullptr, 10), oldest,
                 std::strtoull(argv[5], nullptr, 10));
  } else {
    std::fprintf(stderr, "see the top of bench/store/allocator_costs.cc\n");
    return 2;
  }
}
