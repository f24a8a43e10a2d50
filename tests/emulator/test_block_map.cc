// block_map_kernel on the CPU, beside the host loop and beside the pairs themselves: windows, short
// tiles and short q-blocks, tails, and q-blocks past the batch's last.
#include <random>
#include <vector>

#include "emulator/cuda_on_cpu.h"
#include "emulator/mask_fixture.h"
#include "expect.h"
#include "mask/block_map_kernel.cuh"

namespace {

using namespace mk::mask;

struct Outputs {
  std::vector<int32_t> cu_q_blocks, ranges, counts, partial, full, any;
  std::vector<int64_t> begins;

  Outputs(int64_t requests, int64_t blocks, int64_t width)
      : cu_q_blocks(requests + 1, 7),
        ranges(4 * blocks, 7),
        counts(2 * blocks, 7),
        partial(blocks * width, 7),
        full(partial),
        any(partial) {
    for (int64_t i = 0; i < blocks; ++i) begins.push_back(i * width);
  }
  BlockMapParams put_into(BlockMapParams p) {
    p.cu_q_blocks = cu_q_blocks.data();
    p.ranges = ranges.data();
    p.counts = counts.data();
    p.num_lists = 3;
    const auto size = static_cast<int64_t>(any.size());
    const int64_t half = begins.size() > 1 ? begins[1] / 2 : 0;  // too little room
    p.lists[0] = {partial.data(), size, begins.data(), 0, kPartialTiles};
    p.lists[1] = {full.data(), size, nullptr, half, kFullTiles};
    p.lists[2] = {any.data(), size, begins.data(), 0, kPartialTiles | kFullTiles};
    return p;
  }
  bool operator==(const Outputs& o) const {
    return cu_q_blocks == o.cu_q_blocks && ranges == o.ranges && counts == o.counts &&
           partial == o.partial && full == o.full && any == o.any;
  }
};

// The counts, pair by pair.
void check_pairs(const BlockMapParams& p, const MaskFixture& mask) {
  const auto requests = static_cast<int64_t>(mask.kv_lens.size());
  for (int64_t i = 0; i < p.cu_q_blocks[requests]; ++i) {
    const auto* next = std::upper_bound(p.cu_q_blocks, p.cu_q_blocks + requests + 1, i);
    const int64_t request = next - p.cu_q_blocks - 1;
    const QBlock block = p.block_of(request, i - p.cu_q_blocks[request]);
    int32_t counts[2] = {};
    for (int64_t tile = 0; tile < block.num_tiles; ++tile) {
      int64_t seen = 0, pairs = 0;
      for (int64_t r = 0; r < block.num_rows; ++r) {
        for (int64_t k = tile * p.block_kv; k < (tile + 1) * p.block_kv && k < block.kv_len; ++k) {
          ++pairs;
          seen += mask.sees(block.first_row + r, block.request, k);
        }
      }
      const bool is_whole = pairs == p.block_q * p.block_kv;
      if (seen) ++counts[seen == pairs && (is_whole || !p.whole)];
    }
    EXPECT(p.counts[2 * i] == counts[0] && p.counts[2 * i + 1] == counts[1]);
  }
}

void check(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens, int64_t block_q,
           int64_t block_kv, bool whole, int64_t blocks_more, unsigned seed) {
  const MaskFixture mask(q_lens, kv_lens, seed + 1);
  BlockMapParams p{mask.view(), block_q, block_kv, whole};
  int64_t width = 1;
  for (size_t b = 0; b < q_lens.size(); ++b) {
    p.num_q_blocks += mk::ceil_div(q_lens[b], block_q);
    width = std::max(width, mk::ceil_div(kv_lens[b], block_kv));
  }
  p.num_q_blocks += blocks_more;
  const auto requests = static_cast<int64_t>(q_lens.size());
  Outputs want(requests, p.num_q_blocks, width), got(want);
  const BlockMapParams on_host = want.put_into(p);
  fill_cu_q_blocks(on_host);
  block_map_host(on_host, 0, p.num_q_blocks / 2);
  block_map_host(on_host, p.num_q_blocks / 2, p.num_q_blocks);
  const auto grid = static_cast<unsigned>(std::max<int64_t>(p.num_q_blocks, 1));
  emu::run(block_map_kernel, {grid, kMapThreads, seed}, got.put_into(p));
  EXPECT(got == want);
  check_pairs(on_host, mask);
}

}  // namespace

int main() {
  check({5, 0, 130, 1}, {60, 9, 300, 1}, 4, 8, false, 0, 0);
  check({5, 0, 130, 1}, {60, 9, 300, 1}, 64, 16, true, 3, 3);
  check({150}, {2500}, 128, 1, false, 0, 5);  // three windows, and more rows than threads
  check({3}, {2048}, 2, 2, false, 0, 7);      // windows that are full to the last tile
  check(std::vector<int32_t>(140, 1), std::vector<int32_t>(140, 9), 4, 4, false, 1, 3);
  check({0, 0}, {0, 5}, 128, 128, false, 0, 0);
  check({0}, {0}, 1, 1, false, 2, 0);
  return failures();
}
