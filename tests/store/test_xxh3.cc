// XXH3 by the vectors of this processor: the same values as by the compiler's own choice, of inputs
// of all lengths at which the algorithm changes, at once and in parts.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>

#include "expect.h"
#include "store/xxh3.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

int main() {
  using mk::store::Xxh3;
  const Xxh3* const avx2 = Xxh3::avx2();
  const bool has_avx2 = avx2 && __builtin_cpu_supports("avx2");
  const Xxh3& best = Xxh3::get();
  EXPECT(!has_avx2 || &best == avx2);
  std::mt19937 random(1);
  std::string data(300'003, '\0');
  for (char& byte : data) byte = static_cast<char>(random());
  for (const size_t size : {0,   1,   3,   4,   8,    9,    16,   17,   128,    129,    240,
                            241, 255, 256, 257, 1023, 1024, 1025, 4096, 65'537, 300'000}) {
    for (const size_t begin : {0, 1, 3}) {
      const uint64_t expected = XXH3_64bits(data.data() + begin, size);
      EXPECT(best.hash(data.data() + begin, size) == expected);
      XXH3_state_t state;
      XXH3_INITSTATE(&state);
      XXH3_64bits_reset(&state);
      for (size_t at = 0; at < size;) {
        const size_t part = std::min<size_t>(size - at, random() % 3000);
        best.update(&state, data.data() + begin + at, part);
        at += part;
      }
      EXPECT(XXH3_64bits_digest(&state) == expected);
    }
  }
  return failures() > 0;
}
