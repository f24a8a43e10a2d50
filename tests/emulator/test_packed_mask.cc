// packed_mask_kernel on the CPU, of rows, beside the pairs themselves: rows that share a byte,
// requests that share a word, and words past the last.
#include <vector>

#include "emulator/cuda_on_cpu.h"
#include "emulator/mask_fixture.h"
#include "expect.h"
#include "mask/packed_mask_kernel.cuh"

namespace {

using namespace mk::mask;

void check(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens, unsigned seed) {
  const MaskFixture mask(q_lens, kv_lens, seed + 1);
  std::vector<int64_t> indptr{0};
  for (size_t b = 0; b < q_lens.size(); ++b) {
    indptr.push_back(indptr.back() + (int64_t{q_lens[b]} * kv_lens[b] + 7) / 8);
  }
  const int64_t words = (indptr.back() + 3) / 4 + 1;
  std::vector<uint32_t> got(words, 77), on_host(got);
  std::vector<uint8_t> want(4 * words);
  for (size_t b = 0; b < q_lens.size(); ++b) {
    for (int64_t i = 0; i < int64_t{q_lens[b]} * kv_lens[b]; ++i) {
      const int64_t row = mask.cu_q[b] + i / kv_lens[b];
      const bool seen = mask.sees(row, static_cast<int64_t>(b), i % kv_lens[b]);
      want[indptr[b] + i / 8] |= static_cast<uint8_t>(seen << i % 8);
    }
  }
  using Params = PackedMaskParams<BitsOfRows>;
  const auto params = [&](std::vector<uint32_t>& out) {
    return Params{{mask.view()}, indptr.data(), words, reinterpret_cast<uint8_t*>(out.data())};
  };
  packed_mask_host(params(on_host), 0, words);
  emu::run(packed_mask_kernel<BitsOfRows>, {2, kPackThreads, seed}, params(got));
  EXPECT(std::memcmp(on_host.data(), want.data(), want.size()) == 0);
  EXPECT(got == on_host);
}

// Bits of a rule: causal, and the first key, of two requests; beside the pairs.
void check_rule() {
  const int32_t causal = static_cast<int32_t>(RuleOp::kCausal);
  const int32_t sink = static_cast<int32_t>(RuleOp::kSink);
  const int32_t window = static_cast<int32_t>(RuleOp::kSlidingWindow);
  const std::vector<int32_t> program{4, 0, 4, 0, causal, window, 14, 0, 1, sink, 15, 0, 2, 0, 3, 1};
  const std::vector<int32_t> cu_q{0, 5, 12}, kv_lens{9, 70};
  const std::vector<int64_t> indptr{0, 6, 68};
  std::vector<uint32_t> got(17, 77), on_host(got);
  std::vector<uint8_t> want(68);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < int64_t{cu_q[b + 1] - cu_q[b]} * kv_lens[b]; ++i) {
      const int64_t key = i % kv_lens[b];
      const int64_t position = kv_lens[b] - (cu_q[b + 1] - cu_q[b]) + i / kv_lens[b];
      const bool seen = (key <= position && key > position - 3) || key < 1;
      want[indptr[b] + i / 8] |= static_cast<uint8_t>(seen << i % 8);
    }
  }
  const MaskRowsParams rule{program.data(), {cu_q.data(), kv_lens.data(), 2}, nullptr, 12};
  const auto params = [&](std::vector<uint32_t>& out) {
    return PackedMaskParams<BitsOfRule>{
        {rule}, indptr.data(), 17, reinterpret_cast<uint8_t*>(out.data())};
  };
  packed_mask_host(params(on_host), 0, 17);
  emu::run(packed_mask_kernel<BitsOfRule>, {1, kPackThreads}, params(got));
  EXPECT(std::memcmp(on_host.data(), want.data(), want.size()) == 0);
  EXPECT(got == on_host);
}

}  // namespace

int main() {
  check_rule();
  check({5, 0, 130, 1}, {60, 9, 300, 1}, 0);
  check({7, 3, 2, 9, 9}, {1, 2, 3, 5, 7}, 3);
  check({1, 1, 1, 1}, {3, 1, 1, 100}, 0);
  check({64}, {1000}, 9);
  check({0}, {0}, 0);
  return failures();
}
