#include "transfer/request/overlap.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "common/radix_sort.h"

namespace mk::transfer {
namespace {

constexpr size_t kWordBits = 64;
// Of the bitmap. Clearing a larger one, and missing the cache in it, takes longer than sorting.
constexpr size_t kMaxWordsPerRange = 4;

// Uses differences, as sums might wrap around.
bool is_before(const Range& a, const Range& b) {
  return a.address <= b.address && b.address - a.address >= a.num_bytes;
}

bool ascends(const Ranges& ranges) {
  for (size_t i = 1; i < ranges.count; ++i) {
    if (!is_before(ranges[i - 1], ranges[i])) return false;
  }
  return true;
}

bool descends(const Ranges& ranges) {
  for (size_t i = 1; i < ranges.count; ++i) {
    if (!is_before(ranges[i], ranges[i - 1])) return false;
  }
  return true;
}

uint64_t low_bits(size_t count) { return count < kWordBits ? (uint64_t{1} << count) - 1 : ~0ull; }

// Uses one bit per 2^k bytes, where 2^k divides all distances. A range is a few bits; the last may
// be only partly covered, but no range begins within a bit, so it counts as whole. Empty if the
// bitmap would be too large.
std::optional<bool> overlap_in_bitmap(const Ranges& ranges) {
  if (ranges.size_step != 0) return std::nullopt;
  const uint64_t size = ranges.sizes[0], base = ranges.addresses[0];
  uint64_t low = base, high = base, odd = 0;
  for (size_t i = 0; i < ranges.count; ++i) {
    const uint64_t address = ranges.addresses[i * ranges.address_step];
    low = std::min(low, address);
    high = std::max(high, address);
    odd |= address ^ base;
  }
  if (odd == 0) return true;  // all begin at the same address
  const int shift = __builtin_ctzll(odd);
  const uint64_t range_bits = ((size - 1) >> shift) + 1;
  const uint64_t last_word = ((high - low) >> shift) / kWordBits;
  if (range_bits > kWordBits || last_word > kMaxWordsPerRange * ranges.count) return std::nullopt;
  std::vector<uint64_t> words(last_word + 2);  // a range may extend into one more
  const uint64_t mask = low_bits(range_bits);
  uint64_t taken = 0;
  for (size_t i = 0; i < ranges.count; ++i) {
    const uint64_t bit = (ranges.addresses[i * ranges.address_step] - low) >> shift;
    const uint64_t within = bit % kWordBits;
    uint64_t* const word = &words[bit / kWordBits];
    const uint64_t first = mask << within, second = mask >> 1 >> (kWordBits - 1 - within);
    taken |= (word[0] & first) | (word[1] & second);
    word[0] |= first;
    word[1] |= second;
  }
  return taken != 0;
}

bool overlap_when_sorted(const Ranges& ranges) {
  if (ranges.size_step == 0) {
    std::vector<uint64_t> sorted(ranges.count);
    for (size_t i = 0; i < ranges.count; ++i) sorted[i] = ranges[i].address;
    radix_sort(sorted, [](uint64_t address) { return address; });
    return !ascends({sorted.data(), 1, ranges.sizes, 0, sorted.size()});
  }
  std::vector<Range> sorted(ranges.count);
  for (size_t i = 0; i < ranges.count; ++i) sorted[i] = ranges[i];
  radix_sort(sorted, [](const Range& range) { return range.address; });
  return !ascends(Ranges::rows(sorted));
}

// Finds the pair, given that there is one.
std::pair<size_t, size_t> locate(const Ranges& ranges) {
  std::vector<size_t> order(ranges.count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return ranges[a].address < ranges[b].address; });
  const auto overlap = [&](size_t a, size_t b) { return !is_before(ranges[a], ranges[b]); };
  const auto at = std::adjacent_find(order.begin(), order.end(), overlap);
  return std::minmax(at[0], at[1]);
}

}  // namespace

std::optional<std::pair<size_t, size_t>> find_overlap(const Ranges& ranges) {
  if (ranges.count < 2 || ascends(ranges) || descends(ranges)) return std::nullopt;
  const std::optional<bool> known = overlap_in_bitmap(ranges);
  if (!(known ? *known : overlap_when_sorted(ranges))) return std::nullopt;
  return locate(ranges);
}

}  // namespace mk::transfer
