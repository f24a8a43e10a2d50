// transform_blocks_kernel on the CPU, by units and row by row, beside the host loop.
#include "emulator/cuda_on_cpu.h"
#include "expect.h"
#include "kv/transform_blocks_kernel.cuh"

namespace {

using namespace mk;
using namespace mk::kv;

constexpr int kLayers = 2, kPlanes = 2 * kLayers, kBlocks = 5, kTokens = 3;

struct Case {
  ElementType src_type, dst_type;
  int64_t src_size, dst_size, dim;
  int64_t first, num_pairs;  // no pairs: nothing is turned
  bool interleaved;
  int64_t padding = 0;  // bytes behind each row: more than 0 leaves rows unaligned
  int64_t heads = 2;
  int64_t pieces = 1;       // that a block of either side is cut into, of a token each; or one
  int64_t first_plane = 0;  // what the planes of former launches were
};

// src is [plane, block, token, head, dim], dst [plane, block, head, token, dim].
struct Job {
  Case c;
  std::vector<char> src, dst;
  std::vector<int64_t> src_ids{4, 0, kHole, 2, 1}, sums = std::vector<int64_t>(5, 0);
  std::vector<int64_t> expected, actual;
  std::vector<int32_t> dst_ids{1, 3, 0, kHole, 4};
  std::vector<float> scales, cos_sin;

  explicit Job(const Case& c) : c(c) {
    const size_t rows = size_t{kPlanes} * kBlocks * kTokens * c.heads;
    src.resize(rows * (c.dim * c.src_size + c.padding));
    dst.assign(rows * (c.dim * c.dst_size + c.padding), 0x77);
    // No exponent is so large that it could be infinity or NaN, whatever the type.
    for (size_t i = 0; i < src.size(); ++i) {
      src[i] = static_cast<char>((i * 2654435761u >> 13) & 0xbb);
    }
    for (int i = 0; i < (c.first_plane + kPlanes) * c.heads; ++i) {
      scales.push_back(0.25f + 0.125f * i);
    }
    for (int64_t i = 0; i < 5 * c.pieces * 2 * c.num_pairs; ++i) {
      cos_sin.push_back(0.5f - 0.01f * (i % 90));
    }
  }

  TransformBlocksParams params() {
    TransformBlocksParams p{};
    p.src_row_bytes = c.dim * c.src_size;
    p.dst_row_bytes = c.dim * c.dst_size;
    const int64_t src_row = p.src_row_bytes + c.padding, dst_row = p.dst_row_bytes + c.padding;
    CopyBlocksParams& copy = p.copy;
    const int64_t src_block = kTokens * c.heads * src_row, dst_block = kTokens * c.heads * dst_row;
    const int64_t src_token = c.heads * src_row, tokens = kTokens / c.pieces;
    copy.src = {src_ids.data(), true, kBlocks, src_block, c.pieces, tokens * src_token, 1, 0};
    copy.dst = {dst_ids.data(), false, kBlocks, dst_block, c.pieces, tokens * dst_row, 1, 0};
    copy.num_pieces = static_cast<int64_t>(src_ids.size()) * c.pieces;
    copy.run_bytes = p.src_row_bytes;
    copy.axes[0] = {c.heads, src_row, kTokens * dst_row};
    copy.axes[1] = {tokens, src_token, dst_row};
    copy.num_planes = kPlanes;
    for (int i = 0; i < kPlanes; ++i) {
      copy.planes[i] = {src.data() + i * src.size() / kPlanes,
                        dst.data() + i * dst.size() / kPlanes};
    }
    p.keys_alternate = true;
    p.dim = c.dim;
    p.src_type = c.src_type;
    p.dst_type = c.dst_type;
    p.scales = c.src_type != c.dst_type ? scales.data() : nullptr;
    p.rotation = {c.num_pairs ? cos_sin.data() : nullptr, c.first, c.num_pairs, c.interleaved};
    p.sums = sums.data();
    p.first_word = 3;
    p.first_plane = c.first_plane;
    if (!expected.empty()) p.expected = expected.data();
    if (!actual.empty()) p.actual = actual.data();
    return p;
  }
};

void run_kernel(const TransformBlocksParams& p, const emu::Launch& launch, BadId* bad) {
  with_transform_kernel(p, [&](auto kernel, const TransformTiling& tiling) {
    emu::run(kernel, launch, p, tiling, bad);
  });
}

void check(const Case& c, bool by_unit, unsigned seed, unsigned num_threads = kThreads) {
  Job host(c), device(c);
  const TransformBlocksParams on_host = host.params(), on_device = device.params();
  transform_blocks_host(on_host, 0, on_host.copy.num_pieces * kPlanes);
  BadId bad{};
  EXPECT(tile_rows(on_device).by_unit == by_unit);
  run_kernel(on_device, {3, num_threads, seed}, &bad);
  EXPECT(device.dst == host.dst);
  EXPECT(device.sums == host.sums);
  EXPECT(host.sums[0] != 0 && host.sums[2] == 0);
  EXPECT(bad.side == 0);
}

void check_sums_alone(const Case& c) {
  Job host(c), device(c);
  for (Job* job : {&host, &device}) {
    TransformBlocksParams p = job->params();
    p.src_type = p.dst_type = ElementType::kBytes;
    p.scales = p.rotation.cos_sin = nullptr;
    p.copy.dst = {nullptr, false, p.copy.num_pieces, 0, 1, 0, 1, 0};
    for (Axis& axis : p.copy.axes) axis.dst_stride = 0;
    for (int i = 0; i < kPlanes; ++i) p.copy.planes[i].dst = nullptr;
    p.dst_row_bytes = p.src_row_bytes;
    BadId bad{};
    if (job == &host) {
      transform_blocks_host(p, 0, p.copy.num_pieces * kPlanes);
    } else {
      run_kernel(p, {2, kThreads, 5}, &bad);
    }
  }
  EXPECT(host.sums == device.sums);
  EXPECT(host.sums[0] != 0 && host.sums[2] == 0 && host.sums[3] != 0);
}

void check_that_the_wrong_is_reported_and_skipped() {
  const ElementType type = ElementType::kBytes;
  Job job({type, type, 1, 1, 32, 0, 0, false});
  job.expected = {1, 2, 3, 4, 5};
  job.actual = {1, 7, 0, 0, 5};  // the third and the fourth are holes
  BadId bad{};
  const TransformBlocksParams p = job.params();
  run_kernel(p, {1, kThreads}, &bad);
  EXPECT(bad.side == kBadChecksum && bad.index == 1 && bad.id == 0);
  EXPECT(job.sums[1] == 0 && job.sums[0] != 0 && job.sums[4] != 0);

  Job other({type, type, 1, 1, 32, 0, 0, false});
  other.src_ids[4] = kBlocks;
  bad = {};
  const TransformBlocksParams q = other.params();
  run_kernel(q, {1, kThreads}, &bad);
  EXPECT(bad.side == 1 && bad.index == 4 && bad.id == kBlocks);
}

}  // namespace

int main() {
  const auto f32 = ElementType::kFloat32, f16 = ElementType::kFloat16;
  const auto bf16 = ElementType::kBFloat16, e4m3 = ElementType::kFloat8E4M3;
  const auto e5m2 = ElementType::kFloat8E5M2, bytes = ElementType::kBytes;
  for (unsigned seed = 0; seed < 2; ++seed) {
    check({bf16, e4m3, 2, 1, 16, 0, 0, false}, true, seed);
    check({bf16, e4m3, 2, 1, 576, 512, 32, false}, true, seed, kMaxTransformThreads);
    check({f32, e5m2, 4, 1, 48, 16, 16, true}, true, seed);
    check({e5m2, f16, 1, 2, 48, 16, 8, false}, true, seed);
    check({e4m3, f32, 1, 4, 16, 0, 8, false}, true, seed);
    check({bf16, bf16, 2, 2, 64, 0, 32, false}, true, seed);
    check({f16, f16, 2, 2, 24, 8, 8, true}, true, seed);
    check({f32, f32, 4, 4, 16, 0, 4, true}, true, seed);
    check({bytes, bytes, 1, 1, 656, 0, 0, false}, true, seed);
    check({bytes, bytes, 1, 1, 7, 0, 0, false}, false, seed);
    check({bf16, e4m3, 2, 1, 7, 1, 2, true}, false, seed);
    check({f16, f16, 2, 2, 16, 2, 4, false}, false, seed);
    check({f32, e4m3, 4, 1, 16, 0, 8, false, 1}, false, seed);
    // More rows than a tile has; blocks of several pieces; planes behind those of other launches.
    check({bf16, e4m3, 2, 1, 16, 0, 8, false, 0, 100}, true, seed);
    check({bytes, bytes, 1, 1, 7, 0, 0, false, 0, 100}, false, seed);
    check({e4m3, f16, 1, 2, 16, 0, 8, true, 0, 2, kTokens}, true, seed);
    check({bf16, e4m3, 2, 1, 16, 0, 8, false, 0, 2, 1, 3}, true, seed);
    // Where one size alone keeps rows from being taken by units.
    check({bf16, e4m3, 2, 1, 32, 4, 8, false}, false, seed);
    check({bf16, e4m3, 2, 1, 16, 0, 4, false}, false, seed);
    check({e4m3, e4m3, 1, 1, 24, 0, 8, false}, false, seed);
  }
  check_sums_alone({bytes, bytes, 1, 1, 32, 0, 0, false});
  check_sums_alone({bytes, bytes, 1, 1, 13, 0, 0, false});
  check_that_the_wrong_is_reported_and_skipped();
  return failures();
}
