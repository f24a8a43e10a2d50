#include "transfer/request/overlap.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "common/radix_sort.h"

namespace mk::transfer {
namespace {

constexpr size_t kWordBits = 64;
// Of the marks. Clearing more, and missing the cache in them, takes longer than sorting.
constexpr size_t kMaxWordsPerRange = 4;
constexpr uint64_t kMaxByteMarks = 16 << 20;  // more would miss even the last cache

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

// Of addresses. The bits in which any two of them differ are `differing`.
struct Bounds {
  uint64_t low, high, differing;

  static Bounds of(const Ranges& ranges) {
    const uint64_t first = ranges.addresses[0];
    Bounds bounds{first, first, 0}, others = bounds;  // two, as a step waits for the last one
    size_t i = 0;
    for (; i + 1 < ranges.count; i += 2) {
      bounds.add(ranges.addresses[i * ranges.address_step], first);
      others.add(ranges.addresses[(i + 1) * ranges.address_step], first);
    }
    if (i < ranges.count) bounds.add(ranges.addresses[i * ranges.address_step], first);
    return {std::min(bounds.low, others.low), std::max(bounds.high, others.high),
            bounds.differing | others.differing};
  }

 private:
  void add(uint64_t address, uint64_t first) {
    low = std::min(low, address);
    high = std::max(high, address);
    differing |= address ^ first;
  }
};

// Whether any of `count` marks, from 0 to `last`, is there twice. Bytes: before a bit of a word can
// be set, the word's last change must have arrived.
template <class MarkOf>
bool taken_twice_in_bytes(uint64_t last, size_t count, MarkOf mark_of) {
  std::vector<uint8_t> marks(last + 1);
  uint8_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    uint8_t& mark = marks[mark_of(i)];
    taken |= mark;
    mark = 1;
  }
  return taken != 0;
}

// Likewise, of at most kWordBits marks each, the first of which are from 0 to `last`.
template <class MarkOf>
bool taken_twice_in_bits(uint64_t last, uint64_t range_marks, size_t count, MarkOf mark_of) {
  std::vector<uint64_t> words(last / kWordBits + 2);  // a range may extend into one more
  const uint64_t mask = low_bits(range_marks);
  uint64_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t mark = mark_of(i), within = mark % kWordBits;
    const auto take = [&](uint64_t& word, uint64_t bits) {
      taken |= word & bits;
      word |= bits;
    };
    uint64_t* const word = &words[mark / kWordBits];
    take(word[0], mask << within);
    if (within + range_marks > kWordBits) take(word[1], mask >> (kWordBits - within));
  }
  return taken != 0;
}

// Uses one mark per 2^k bytes, where 2^k divides all distances. A range is a few of them; the last
// may be only partly covered, but no range begins within one, so it counts as whole. Empty if there
// would be too many.
std::optional<bool> overlap_in_marks(const Ranges& ranges) {
  if (ranges.size_step != 0) return std::nullopt;
  const uint64_t size = ranges.sizes[0];
  const Bounds bounds = Bounds::of(ranges);
  if (bounds.differing == 0) return true;  // all begin at the same address
  const int shift = __builtin_ctzll(bounds.differing);
  const uint64_t range_marks = ((size - 1) >> shift) + 1;
  const uint64_t last = (bounds.high - bounds.low) >> shift;
  const auto mark_of = [&](size_t i) {
    return (ranges.addresses[i * ranges.address_step] - bounds.low) >> shift;
  };
  const size_t most_words = kMaxWordsPerRange * ranges.count;
  const bool fit_bytes = last < kMaxByteMarks && last / sizeof(uint64_t) <= most_words;
  if (range_marks == 1 && fit_bytes) {
    return taken_twice_in_bytes(last, ranges.count, mark_of);
  }
  if (range_marks > kWordBits || last / kWordBits > most_words) return std::nullopt;
  return taken_twice_in_bits(last, range_marks, ranges.count, mark_of);
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
  const std::optional<bool> known = overlap_in_marks(ranges);
  if (!(known ? *known : overlap_when_sorted(ranges))) return std::nullopt;
  return locate(ranges);
}

}  // namespace mk::transfer
