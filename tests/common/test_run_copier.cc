// RunCopier, streaming whatever the size of the job: every length, alignment and number of runs.
#include <cstdint>
#include <vector>

#include "common/run_copier.h"
#include "expect.h"

namespace {

using namespace mk;

// Runs `gap` bytes apart; each is copied to where it is, shifted by `dst_offset`.
void check(int64_t run_bytes, int num_runs, int64_t gap, int64_t src_offset, int64_t dst_offset,
           int64_t total_bytes) {
  const int64_t step = run_bytes + gap;
  const size_t num_bytes = num_runs * step;
  std::vector<char> src(src_offset + num_bytes), memory(num_bytes + dst_offset + 128, 0x77);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 2654435761u >> 13);
  const auto misaligned = reinterpret_cast<uintptr_t>(memory.data()) % 64;
  char* const dst = memory.data() + (64 - misaligned) % 64 + dst_offset;
  std::vector<char> want = memory;
  const auto shift = dst - memory.data();
  RunCopier copier(total_bytes, run_bytes);
  for (int r = 0; r < num_runs; ++r) {
    const char* const from = src.data() + src_offset + r * step;
    std::copy(from, from + run_bytes, want.begin() + shift + r * step);
    copier.add({from, dst + r * step});
  }
  copier.finish();
  EXPECT(memory == want);  // and nothing beside it was written
  copier.finish();         // nothing is left
  EXPECT(memory == want);
}

}  // namespace

int main() {
  constexpr int64_t kHuge = int64_t{1} << 60;
  for (const int64_t total_bytes : {int64_t{0}, kHuge}) {
    for (const int64_t run_bytes :
         {1,    64,   127,  128,  192,  256,  320,  512,   1000,  1024,
          1025, 1087, 1152, 2048, 4096, 4100, 9001, 16384, 65536, 70001}) {
      for (const int num_runs : {0, 1, 3, 4, 5, 7, 8, 9, 21}) {
        for (const int64_t gap : {0, 64, 24}) check(run_bytes, num_runs, gap, 0, 0, total_bytes);
        check(run_bytes, num_runs, 0, 1, 0, total_bytes);
        check(run_bytes, num_runs, 0, 0, 1, total_bytes);
        check(run_bytes, num_runs, 64, 5, 63, total_bytes);
      }
    }
  }
  return failures();
}
