// Checksums of objects that are copied, as XXH3 of the whole: in and out, cut anywhere, parts of
// them only, and while others write to the source or the destination.
#include "store/checksum.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>

#include "common/run_copier.h"
#include "expect.h"
#include "store/xxh3.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace {

using mk::store::HashedCopy;
using mk::store::Xxh3;
using Direction = HashedCopy::Direction;

std::mt19937 randomly(1);

std::string random_bytes(size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(randomly());
  return bytes;
}

size_t up_to(size_t most) { return randomly() % (most + 1); }

void test_pieces(size_t size) {
  const std::string source = random_bytes(size);
  const uint64_t expected = XXH3_64bits(source.data(), size);
  for (const size_t most : {size, size_t{3}, size_t{64}, size_t{200}, size_t{5000}}) {
    std::string object(size, '\0'), copy(size, '\0');
    HashedCopy in(object.data(), size, Direction::kIn), out(source.data(), size, Direction::kOut);
    for (size_t at = 0; at < size;) {
      const size_t part = most == size ? size : std::min(up_to(most), size - at);
      // The source, then the destination, is somewhere else for each piece, at any alignment.
      const size_t shift = up_to(70);
      std::string elsewhere(shift + part, '\0');
      std::memcpy(elsewhere.data() + shift, source.data() + at, part);
      in.add(object.data() + at, elsewhere.data() + shift, part);
      std::memset(elsewhere.data(), 0, elsewhere.size());
      out.add(elsewhere.data() + shift, source.data() + at, part);
      std::memcpy(copy.data() + at, elsewhere.data() + shift, part);
      at += part;
    }
    EXPECT(object == source && in.value() == expected);
    EXPECT(copy == source && out.value() == expected);
  }
}

void test_parts(size_t size) {
  const std::string source = random_bytes(size);
  for (int i = 0; i < 20; ++i) {
    const size_t begin = up_to(size), count = up_to(size - begin);
    std::string copy(count, '\0');
    HashedCopy out(source.data(), size, Direction::kOut);
    out.skip(begin);
    out.add(copy.data(), source.data() + begin, count);
    out.skip(size - begin - count);
    EXPECT(copy == source.substr(begin, count));
    EXPECT(out.value() == XXH3_64bits(source.data(), size));
  }
}

void test_concurrent_changes_of_the_source() {
  const std::string source = random_bytes(10'000);
  std::string object(source.size(), '\0'), changed = source, copy(source.size(), '\0');
  HashedCopy in(object.data(), source.size(), Direction::kIn);
  HashedCopy out(source.data(), source.size(), Direction::kOut);
  for (size_t at = 0; at < source.size(); at += 1000) {
    in.add(object.data() + at, changed.data() + at, 1000);
    std::memset(changed.data() + at, 0, 1000);
    out.add(copy.data() + at, source.data() + at, 1000);
    std::memset(copy.data() + at, 0, 1000);
  }
  EXPECT(object == source);
  EXPECT(in.value() == XXH3_64bits(object.data(), object.size()));
  EXPECT(out.value() == XXH3_64bits(source.data(), source.size()));
}

void test_vectors() {
  const Xxh3* const avx2 = Xxh3::avx2();
  if (!avx2 || !__builtin_cpu_supports("avx2")) return;
  const std::string source = random_bytes(64 * 100);
  for (const uint64_t first : {0, 1, 15, 16, 31}) {
    uint64_t a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = b[i] = randomly();
    std::string copy(source.size(), '\0');
    Xxh3::plain().add(a, first, 100, source.data(), copy.data());
    EXPECT(copy == source);
    avx2->add(b, first, 100, source.data(), nullptr);
    EXPECT(std::equal(a, a + 8, b));
  }
}

}  // namespace

int main() {
  for (const bool streams : {false, true}) {
    if (streams) mk::set_stream_from_bytes(1);
    for (const size_t size : {0,   1,   3,   16,   17,   128,  129,  240,  241,    255,    256,
                              257, 320, 321, 1024, 1025, 1088, 1089, 4096, 65'537, 300'000}) {
      test_pieces(size);
      test_parts(size);
    }
    test_concurrent_changes_of_the_source();
  }
  test_vectors();
  return failures() > 0;
}
