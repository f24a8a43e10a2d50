// radix_sort against std::stable_sort, over keys of any spread.
#include "common/radix_sort.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "expect.h"

namespace {

struct Item {
  uint64_t key;
  size_t index;
  bool operator==(const Item& other) const { return key == other.key && index == other.index; }
};

void check(size_t count, uint64_t low, uint64_t spread, int shift, std::mt19937_64& random) {
  std::vector<Item> items;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t offset = spread == 0 ? random() : random() % spread;
    items.push_back({low + (offset << shift), i});
  }
  std::vector<Item> expected = items;
  std::stable_sort(expected.begin(), expected.end(),
                   [](const Item& a, const Item& b) { return a.key < b.key; });
  mk::radix_sort(items, [](const Item& item) { return item.key; });
  EXPECT(items == expected);
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  for (const size_t count : {0, 1, 2, 255, 256, 257, 5000}) {
    check(count, 0, 0, 0, random);  // all of the 64 bits
    check(count, UINT64_MAX - 10, 11, 0, random);
    check(count, 7, 1, 0, random);  // all the same
    check(count, 12345, 2, 20, random);
    check(count, 1ull << 46, 1 << 11, 9, random);
    check(count, 3, 1 << 12, 0, random);
    check(count, 5, 1ull << 40, 12, random);
  }
  return failures() != 0;
}
