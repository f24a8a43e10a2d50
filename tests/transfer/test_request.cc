// The parts that make a request, by themselves: overlap, coalescing, blocks of pools, and which of
// its descriptors have arrived.
#include <algorithm>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

#include "common/check.h"
#include "expect.h"
#include "transfer/request/block_pool.h"
#include "transfer/request/coalesce.h"
#include "transfer/request/delivered.h"
#include "transfer/request/overlap.h"
#include "transfer/request/piece.h"

using namespace mk::transfer;

namespace {

using Random = std::mt19937_64;

uint64_t pick(Random& random, uint64_t low, uint64_t high) {
  return low + random() % (high - low + 1);
}

bool overlap(const Range& a, const Range& b) {
  const Range& first = a.address <= b.address ? a : b;
  const Range& second = a.address <= b.address ? b : a;
  return second.address - first.address < first.num_bytes;
}

void check_overlap(const Ranges& ranges) {
  bool expected = false;
  for (size_t i = 0; i < ranges.count && !expected; ++i) {
    for (size_t j = 0; j < i && !expected; ++j) expected = overlap(ranges[i], ranges[j]);
  }
  const auto pair = find_overlap(ranges);
  EXPECT(pair.has_value() == expected);
  if (pair)
    EXPECT(pair->first < pair->second && overlap(ranges[pair->first], ranges[pair->second]));
}

// Blocks in cells of their own, one of which may be put upon another.
void ranges_overlap_or_not() {
  Random random(1);
  for (int round = 0; round < 1000; ++round) {
    const size_t count = pick(random, 0, round % 100 == 0 ? 700 : 40);
    const uint64_t align = uint64_t{1} << pick(random, 0, 12);
    const uint64_t size = align * (pick(random, 0, 1) ? 1 : pick(random, 2, 70));
    const uint64_t cell = size + align * pick(random, 0, 9);
    const uint64_t base = round % 3 == 0 ? UINT64_MAX - cell * 800 : pick(random, 0, 1 << 20);
    std::vector<uint64_t> addresses, sizes;
    for (size_t i = 0; i < count; ++i) {
      addresses.push_back(base + i * cell + align * pick(random, 0, (cell - size) / align));
      sizes.push_back(pick(random, 1, size));
    }
    if (pick(random, 0, 2)) std::shuffle(addresses.begin(), addresses.end(), random);
    if (pick(random, 0, 1)) std::reverse(addresses.begin(), addresses.end());
    const uint64_t odd_size = size - pick(random, 0, align - 1);
    const uint64_t how = pick(random, 0, 3);
    if (count > 1 && how < 3) {  // anywhere, as each of them must be looked at
      uint64_t& moved = addresses[pick(random, 0, count - 1)];
      const uint64_t other = addresses[pick(random, 0, count - 1)];
      moved = other + pick(random, 0, size) - pick(random, 0, size);
      if (how == 2) moved = other + (odd_size - 1) / align * align;  // where its last mark begins
    }
    check_overlap({addresses.data(), 1, &size, 0, count});
    check_overlap({addresses.data(), 1, &odd_size, 0, count});
    check_overlap({addresses.data(), 1, sizes.data(), 1, count});
  }
}

constexpr uint64_t kBorders[] = {1500, 1800};  // of three local regions

struct Run {
  uint64_t local, remote, num_bytes;
  bool operator==(const Run& b) const {
    return local == b.local && remote == b.remote && num_bytes == b.num_bytes;
  }
};

std::vector<Run> runs_of(const Request& request) {
  std::vector<Run> runs;
  for (size_t i = 0; i < request.num_ranges(); ++i) {
    runs.push_back({request.local[i], request.remote[i], request.size_of(i)});
  }
  return runs;
}

// Neighbours at both ends are one run, unless it would cross the border or read what it writes.
std::vector<Run> merged(const std::vector<Run>& blocks) {
  std::vector<Run> runs;
  for (const Run& block : blocks) {
    bool goes_on = false;
    if (!runs.empty()) {
      const Run& run = runs.back();
      const Range from{run.local, run.num_bytes + block.num_bytes};
      const Range to{run.remote, run.num_bytes + block.num_bytes};
      goes_on = block.local == run.local + run.num_bytes &&
                block.remote == run.remote + run.num_bytes &&
                !std::count(std::begin(kBorders), std::end(kBorders), block.local) &&
                (from.address == to.address || !overlap(from, to));
    }
    if (goes_on) {
      runs.back().num_bytes += block.num_bytes;
    } else {
      runs.push_back(block);
    }
  }
  return runs;
}

Request some_request(Random& random) {
  Request request{};
  request.regions = {std::make_shared<Region>(Region{{kBorders[0], 300}, kLocalWrite}),
                     std::make_shared<Region>(Region{{1000, 500}, kLocalWrite}),
                     std::make_shared<Region>(Region{{kBorders[1], 1 << 20}, kLocalWrite})};
  const bool one_size = pick(random, 0, 1);
  uint64_t local = 1000, remote = pick(random, 0, 1) ? 1 << 30 : pick(random, 900, 1100);
  for (uint64_t i = pick(random, 1, 60); i > 0; --i) {
    const uint64_t size = one_size ? 20 : pick(random, 1, 3) * 10;
    if (pick(random, 0, 20) == 0) local = 1000 + pick(random, 0, 90) * 10;
    for (const uint64_t border : kBorders) {
      if (local < border && local + size > border) local = border;
    }
    request.local.push_back(local);
    request.remote.push_back(remote);
    if (!one_size || request.sizes.empty()) request.sizes.push_back(size);
    request.num_bytes += size;
    local += size + (pick(random, 0, 4) == 0);
    remote += size + (pick(random, 0, 4) == 0);
  }
  return request;
}

void what_is_merged_can_be_split() {
  Random random(2);
  for (int round = 0; round < 1000; ++round) {
    Request request = some_request(random);
    const std::vector<Run> blocks = runs_of(request);
    const std::vector<uint64_t> sizes = request.sizes;
    coalesce(request);
    EXPECT(runs_of(request) == merged(blocks));
    const bool is_merged = request.num_ranges() != blocks.size();
    EXPECT(split(request) == is_merged);
    EXPECT(runs_of(request) == blocks && request.sizes == sizes);
    EXPECT(!split(request));
  }
}

// Some of the pieces have arrived, in some order: byte by byte, in the memory they are moved from.
void descriptors_that_have_arrived() {
  Random random(3);
  for (int round = 0; round < 1000; ++round) {
    Request request = some_request(random);
    const std::vector<uint64_t> sizes = request.sizes;
    const size_t count = request.num_ranges();
    const bool is_merged = pick(random, 0, 1);
    if (is_merged) coalesce(request);
    std::vector<bool> bytes;  // of the request, in their order
    std::vector<Range> confirmed;
    Cutter cutter(request, pick(random, 1, 70));
    const uint64_t odds = pick(random, 0, 4);
    for (Piece piece; !cutter.at_end() && cutter.next(piece);) {
      EXPECT(piece.position == bytes.size());
      const bool arrives = pick(random, 0, 4) < odds;
      if (arrives) confirmed.push_back({piece.position, piece.num_bytes});
      bytes.insert(bytes.end(), piece.num_bytes, arrives);
    }
    std::shuffle(confirmed.begin(), confirmed.end(), random);
    std::vector<bool> expected;
    auto at = bytes.begin();
    for (size_t i = 0; i < count; ++i) {
      const auto end = at + static_cast<std::ptrdiff_t>(sizes[sizes.size() == 1 ? 0 : i]);
      expected.push_back(std::find(at, end, false) == end);
      at = end;
    }
    EXPECT(whole_descriptors(request, confirmed) == expected);
  }
  Request nothing{};
  nothing.sizes = {8};
  EXPECT(whole_descriptors(nothing, {}).empty());
}

void blocks_of_pools() {
  const BlockPool near{{1 << 20, 1 << 21}, 10, 64, 96}, far{{1ull << 40, 1ull << 41}, 20, 64, 64};
  const std::vector<int32_t> from{9, 0, 3};
  const std::vector<int64_t> to{1, 19, 0};
  const Integers near_ids{from.data(), Integers::Type::kInt32, 3};
  const Integers far_ids{to.data(), Integers::Type::kInt64, 3};
  const Request request = paged_request(Direction::kWrite, near, near_ids, far, far_ids);
  EXPECT((request.local == std::vector<uint64_t>{(1 << 20) + 864, 1 << 20, (1 << 20) + 288,
                                                 (1 << 21) + 864, 1 << 21, (1 << 21) + 288}));
  EXPECT(request.remote[1] == (1ull << 40) + 19 * 64 && request.remote[5] == 1ull << 41);
  EXPECT(request.num_bytes == 6 * 64 && request.is_distinct);
  for (const std::vector<int64_t>& bad : {std::vector<int64_t>{1, 20, 0}, {1, -1, 0}, {1, 2, 1}}) {
    const Integers ids{bad.data(), Integers::Type::kInt64, 3};
    bool refused = false;
    try {
      paged_request(Direction::kWrite, near, near_ids, far, ids);
    } catch (const mk::InvalidArgument&) {
      refused = true;
    }
    EXPECT(refused);
  }
}

}  // namespace

int main() {
  ranges_overlap_or_not();
  what_is_merged_can_be_split();
  descriptors_that_have_arrived();
  blocks_of_pools();
  return failures() != 0;
}
