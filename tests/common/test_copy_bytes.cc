// copy_bytes at every distance of the two sides within a page: what is copied, and nothing beside.
#include "common/copy_bytes.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "expect.h"

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kMaxBytes = (4 << 20) + 200;
constexpr unsigned char kBeside = 0x5a;

void check(const std::vector<unsigned char>& from, std::vector<unsigned char>& to, size_t src,
           size_t dst, size_t num_bytes) {
  std::fill(to.begin() + dst - 1, to.begin() + dst + num_bytes + 64, kBeside);
  mk::copy_bytes(&to[dst], &from[src], num_bytes);
  EXPECT(std::equal(&to[dst], &to[dst] + num_bytes, &from[src]));
  EXPECT(to[dst - 1] == kBeside);
  EXPECT(std::all_of(&to[dst + num_bytes], &to[dst + num_bytes] + 64,
                     [](unsigned char value) { return value == kBeside; }));
}

}  // namespace

int main() {
  std::mt19937 random(1);
  std::vector<unsigned char> from(kMaxBytes + 3 * kPageBytes), to(from.size() + 64, kBeside);
  for (auto& value : from) value = static_cast<unsigned char>(random());
  const auto address = [](const std::vector<unsigned char>& memory) {
    return reinterpret_cast<uintptr_t>(memory.data());
  };
  // Where `to` must begin so that both are at the same place of a page.
  const size_t base = (address(from) - address(to)) % kPageBytes + kPageBytes;
  for (size_t distance = 0; distance <= 100; ++distance) {
    for (const size_t num_bytes : {0, 1, 63, 2047, 2048, 2049, 2111, 4096, 5000}) {
      const size_t src = random() % 100;
      check(from, to, src, base + src + distance, num_bytes);
    }
  }
  for (const size_t num_bytes :
       {size_t{1} << 20, size_t{4} << 20, (size_t{4} << 20) - 1, kMaxBytes}) {
    for (const size_t distance : {0, 1, 16, 31, 63, 64}) {
      check(from, to, 0, base + distance, num_bytes);
    }
  }
#if defined(__SSE2__)
  const auto at = [](uintptr_t place) { return reinterpret_cast<const void*>(place); };
  EXPECT(mk::dst_follows_src(at(kPageBytes + 16), at(9 * kPageBytes), 4096));
  EXPECT(mk::dst_follows_src(at(kPageBytes + 3), at(8 * kPageBytes - 5), 2048));
  EXPECT(!mk::dst_follows_src(at(kPageBytes), at(9 * kPageBytes), 4096));
  EXPECT(!mk::dst_follows_src(at(kPageBytes + 64), at(9 * kPageBytes), 4096));
  EXPECT(!mk::dst_follows_src(at(kPageBytes), at(9 * kPageBytes + 16), 4096));
  EXPECT(!mk::dst_follows_src(at(kPageBytes + 16), at(9 * kPageBytes), 2047));
#endif
  return failures() == 0 ? 0 : 1;
}
