// copy_blocks_kernel on the CPU, for every vector width, beside the host loop of the same params.
#include "emulator/cuda_on_cpu.h"
#include "expect.h"
#include "kv/copy_blocks_kernel.cuh"

namespace {

using namespace mk::kv;

constexpr int kLayers = 2, kBlocks = 5, kHeads = 2, kTokens = 3;

// src is [layer, block, token, head, dim], dst [layer, block, head, token, dim].
CopyBlocksParams make_params(const std::vector<char>& src, std::vector<char>& dst,
                             const std::vector<int64_t>& src_ids,
                             const std::vector<int32_t>& dst_ids, int64_t dim) {
  CopyBlocksParams p{};
  const int64_t block_stride = kTokens * kHeads * dim;
  p.src = {src_ids.data(), true, kBlocks, block_stride, 1, 0, 1, 0};
  p.dst = {dst_ids.data(), false, kBlocks, block_stride, 1, 0, 1, 0};
  p.num_pieces = src_ids.size();
  p.run_bytes = dim;
  p.axes[0] = {kHeads, dim, kTokens * dim};
  p.axes[1] = {kTokens, kHeads * dim, dim};
  p.num_planes = kLayers;
  const int64_t plane_bytes = kBlocks * block_stride;
  for (int i = 0; i < kLayers; ++i) {
    p.planes[i] = {src.data() + i * plane_bytes, dst.data() + i * plane_bytes};
  }
  return p;
}

template <class Vector>
void check(int64_t dim, unsigned seed, unsigned num_threads = kThreads) {
  const size_t num_bytes = size_t{kLayers} * kBlocks * kTokens * kHeads * dim;
  std::vector<char> src(num_bytes), dst(num_bytes, 0x77), want(num_bytes, 0x77);
  for (size_t i = 0; i < num_bytes; ++i) src[i] = static_cast<char>(i * 2654435761u >> 13);
  const std::vector<int64_t> src_ids{4, 0, kHole, 2, 1};
  const std::vector<int32_t> dst_ids{1, 3, 0, kHole, 4};

  CopyBlocksParams p = make_params(src, want, src_ids, dst_ids, dim);
  copy_blocks_host(p, 0, p.num_pieces * p.num_planes);
  p = make_params(src, dst, src_ids, dst_ids, dim);
  BadId bad{};
  emu::run(copy_blocks_kernel<Vector>, {3, num_threads, seed}, p, tile_runs<Vector>(p), &bad);
  EXPECT(dst == want);
  EXPECT(bad.side == 0);
}

// A block of src is two pieces, one of dst is one; and single tokens of padded blocks, by slots.
void check_sides() {
  const int64_t dim = 16, block = kTokens * dim;
  std::vector<char> src(4 * 2 * block), dst(6 * block, 0x77), want = dst;
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 2654435761u >> 13);
  const std::vector<int64_t> src_ids{3, kHole, 0}, src_slots{3, 0, 2 * 4 + 1};
  const std::vector<int32_t> dst_ids{1, 5, 0, 4, 2}, dst_slots{kTokens * 6 - 1, 4, 0};
  const auto run = [&](bool by_slot, std::vector<char>& out, bool on_device) {
    CopyBlocksParams p{};
    p.src = by_slot ? Side{src_slots.data(), true, 3 * 4, 2 * block, 1, 0, 4, dim}
                    : Side{src_ids.data(), true, 4, 2 * block, 2, block, 1, 0};
    p.dst = by_slot ? Side{dst_slots.data(), false, 6 * kTokens, dim, 1, 0, 1, 0}
                    : Side{dst_ids.data(), false, 6, block, 1, 0, 1, 0};
    p.num_pieces = by_slot ? 3 : 5;
    p.run_bytes = by_slot ? dim : block;
    p.axes[0] = p.axes[1] = {1, 0, 0};
    p.num_planes = 1;
    p.planes[0] = {src.data(), out.data()};
    BadId bad{};
    if (!on_device) return copy_blocks_host(p, 0, p.num_pieces * p.num_planes);
    emu::run(copy_blocks_kernel<uint4>, {2, kThreads}, p, tile_runs<uint4>(p), &bad);
    EXPECT(bad.side == 0);
  };
  for (const bool by_slot : {false, true}) {
    run(by_slot, want, false);
    run(by_slot, dst, true);
    EXPECT(dst == want);
  }
  const auto same = [&](int64_t to, int64_t from, int64_t num_bytes) {
    return std::equal(want.begin() + to, want.begin() + to + num_bytes, src.begin() + from);
  };
  EXPECT(same(5 * block, 3 * 2 * block + block, block - dim));  // the second half of block 3
  EXPECT(same(2 * block, 0, block));
  EXPECT(same(0, 2 * 2 * block + dim, dim));  // slot 1 of the third padded block
}

void check_bad_ids() {
  const int64_t dim = 16;
  std::vector<char> src(kLayers * kBlocks * kTokens * kHeads * dim, 1), dst(src.size(), 0);
  const std::vector<int64_t> src_ids{0, kBlocks, 1};
  const std::vector<int32_t> dst_ids{2, 3, -2};
  const CopyBlocksParams p = make_params(src, dst, src_ids, dst_ids, dim);
  BadId bad{};
  emu::run(copy_blocks_kernel<uint4>, {1, kThreads}, p, tile_runs<uint4>(p), &bad);
  const bool names_one = (bad.side == 1 && bad.index == 1 && bad.id == kBlocks) ||
                         (bad.side == 2 && bad.index == 2 && bad.id == -2);
  EXPECT(names_one);
  EXPECT(std::count(dst.begin(), dst.end(), 1) ==
         kLayers * kTokens * kHeads * dim);  // the good pair
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 3; ++seed) {
    check<uint4>(16, seed);
    check<uint4>(48, seed);
    check<uint4>(4096, seed);             // several tiles a run
    check<uint4>(48, seed, kMaxThreads);  // as with max_sms
    check<uint32_t>(20, seed);
    check<uint8_t>(1, seed);
    check<uint8_t>(7, seed);
    check<uint8_t>(301, seed);
  }
  check_sides();
  check_bad_ids();
  return failures();
}
