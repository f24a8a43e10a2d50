// How a piece is cut into slices for NICs: every byte once, by regions, and no small tails.
#include "transfer/rdma/slicer.h"

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "expect.h"

using namespace mk::transfer;

namespace {

int num_allocated = 0;

}  // namespace

void* operator new(size_t size) {
  ++num_allocated;
  return std::malloc(size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

constexpr uint64_t kSlice = 1000;
constexpr uint64_t kHere = 1 << 30, kThere = 1ull << 40;  // nothing is there: it is only looked at

// Regions of `region_bytes`, one behind the other, at both ends.
struct World {
  World(size_t num_regions, uint64_t region_bytes, bool on_nics = true,
        Rights rights = kRemoteRead | kRemoteWrite) {
    std::vector<RemoteRegion> told;
    for (size_t i = 0; i < num_regions; ++i) {
      const uint64_t offset = i * region_bytes;
      auto region = std::make_shared<Region>();
      region->range = {kHere + offset, region_bytes};
      if (on_nics) region->on_nics = std::make_shared<NicMemory>();
      request.regions.push_back(std::move(region));
      told.push_back({{kThere + offset, region_bytes}, rights, {}, {}});
    }
    keys.add(std::move(told));
  }

  void add(uint64_t here, uint64_t there, uint64_t num_bytes) {
    request.local.push_back(kHere + here);
    request.remote.push_back(kThere + there);
    request.sizes.push_back(num_bytes);
    request.num_bytes += num_bytes;
  }

  bool cut() {
    give_back(slices, spare);
    Cutter pieces(request, UINT64_MAX);
    bool all = true;
    for (Piece piece; pieces.next(piece);) {
      all = all && mk::transfer::cut(request, piece, keys, kSlice, slices, spare);
    }
    return all;
  }

  std::vector<uint64_t> sizes() const {
    std::vector<uint64_t> found;
    for (const Slice& slice : slices) found.push_back(slice.num_bytes);
    return found;
  }

  Request request{};
  RemoteKeys keys;
  Slices slices, spare;
};

using Sizes = std::vector<uint64_t>;

void test_tails() {
  for (const auto& [num_bytes, expected] : std::map<uint64_t, Sizes>{
           {1, {1}},
           {250, {250}},  // there is none before it
           {1000, {1000}},
           {1001, {1001}},
           {1250, {1250}},
           {1251, {1000, 251}},
           {2000, {1000, 1000}},
           {3100, {1000, 1000, 1100}},
           {3999, {1000, 1000, 1000, 999}},
       }) {
    World world(1, 1 << 20);
    world.add(10, 5000, num_bytes);
    EXPECT(world.cut());
    EXPECT(world.sizes() == expected);
    for (const Slice& slice : world.slices) EXPECT(slice.segments.size() == 1);
  }
}

void test_tail_stays_within_its_own_regions() {
  World world(2, 10000);
  world.add(0, 0, 1100);          // of the first regions
  world.add(10000, 10000, 1200);  // of the second
  world.add(1100, 10000 + 5000, 50);
  EXPECT(world.cut());
  EXPECT((world.sizes() == Sizes{1100, 1200, 50}));
  for (const Slice& slice : world.slices) EXPECT(world.keys.find(slice) != nullptr);
}

void test_ranges_that_no_nic_can_move() {
  World not_on_nics(1, 10000, false);
  not_on_nics.add(0, 0, 100);
  EXPECT(!not_on_nics.cut());
  World read_only(1, 10000, true, kRemoteRead);
  read_only.request.direction = Direction::kWrite;
  read_only.add(0, 0, 100);
  EXPECT(!read_only.cut());
  World beyond(1, 10000);
  beyond.add(0, 9950, 100);
  EXPECT(!beyond.cut());
}

// Any ranges: each byte goes once, from where it is to where it belongs.
void test_any_shape() {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    World world(3, 20000);
    const int num_ranges = 1 + static_cast<int>(random() % 20);
    for (int i = 0; i < num_ranges; ++i) {
      const uint64_t num_bytes = 1 + random() % 2500;
      const uint64_t here = random() % 3 * 20000 + random() % (20000 - num_bytes);
      world.add(here, random() % 3 * 20000 + random() % (20000 - num_bytes), num_bytes);
    }
    EXPECT(world.cut());
    std::map<std::pair<uint64_t, uint64_t>, int> left;  // how often a byte is to go
    for (size_t i = 0; i < world.request.sizes.size(); ++i) {
      for (uint64_t k = 0; k < world.request.sizes[i]; ++k) {
        ++left[{world.request.local[i] + k, world.request.remote[i] + k}];
      }
    }
    for (const Slice& slice : world.slices) {
      uint64_t num_bytes = 0;
      for (const auto& segment : slice.segments) {
        for (uint64_t k = 0; k < segment.num_bytes; ++k) {
          const std::pair byte(segment.local + k, segment.remote + k);
          EXPECT(--left[byte] >= 0);
        }
        num_bytes += segment.num_bytes;
      }
      EXPECT(num_bytes == slice.num_bytes && num_bytes <= kSlice + kSlice / 4);
      EXPECT(world.keys.find(slice) != nullptr);
    }
    for (const auto& [byte, count] : left) EXPECT(count == 0);
  }
}

// A piece costs some allocations, whatever its size; its slices, once there are spare ones, none.
void test_slices_are_reused() {
  int counts[2];
  for (const int i : {0, 1}) {
    const uint64_t num_slices = i == 0 ? 1 : 500;
    World world(1, 1 << 20);
    world.add(0, 0, num_slices * kSlice);
    EXPECT(world.cut() && world.cut());
    const int before = num_allocated;
    EXPECT(world.cut() && world.slices.size() == num_slices);
    counts[i] = num_allocated - before;
  }
  EXPECT(counts[0] == counts[1]);
}

}  // namespace

int main() {
  test_slices_are_reused();
  test_tails();
  test_tail_stays_within_its_own_regions();
  test_ranges_that_no_nic_can_move();
  test_any_shape();
  return failures() ? 1 : 0;
}
