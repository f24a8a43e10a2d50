// copy_blocks_host cut into parts, as threads take them, compared with a loop over blocks and
// planes: each part once, in any order, with planes apart from each other and planes within their
// blocks.
#include <algorithm>
#include <random>
#include <vector>

#include "expect.h"
#include "kv/copy_blocks.h"

namespace {

using namespace mk::kv;

constexpr int64_t kRun = 24, kBlocks = 3000, kPlanes = 5,
                  kIds = 2500;  // more than a tile of pieces
constexpr int64_t kBytes = kBlocks * kPlanes * kRun;

struct Strides {
  int64_t block;
  int64_t plane;
};
constexpr Strides kApart{kRun, kBlocks * kRun}, kWithin{kPlanes * kRun, kRun};

std::vector<int64_t> shuffled_ids(std::mt19937& random) {
  std::vector<int64_t> ids(kBlocks);
  for (int64_t i = 0; i < kBlocks; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(kIds);
  for (int64_t i = 0; i < kIds; i += 97) ids[i] = kHole;
  return ids;
}

void check(Strides src_strides, Strides dst_strides, unsigned seed) {
  std::mt19937 random(seed);
  const std::vector<int64_t> src_ids = shuffled_ids(random), dst_ids = shuffled_ids(random);
  std::vector<char> src(kBytes), dst(kBytes, 0), want = dst;
  for (char& byte : src) byte = static_cast<char>(1 + random() % 100);

  CopyBlocksParams p{};
  p.src = {src_ids.data(), true, kBlocks, src_strides.block, 1, 0, 1, 0};
  p.dst = {dst_ids.data(), true, kBlocks, dst_strides.block, 1, 0, 1, 0};
  p.num_pieces = kIds;
  p.run_bytes = kRun;
  p.axes[0] = p.axes[1] = {1, 0, 0};
  p.num_planes = kPlanes;
  for (int64_t plane = 0; plane < kPlanes; ++plane) {
    p.planes[plane] = {src.data() + plane * src_strides.plane,
                       dst.data() + plane * dst_strides.plane};
    for (int64_t i = 0; i < kIds; ++i) {
      if (src_ids[i] == kHole || dst_ids[i] == kHole) continue;
      std::copy_n(src.data() + plane * src_strides.plane + src_ids[i] * src_strides.block, kRun,
                  want.data() + plane * dst_strides.plane + dst_ids[i] * dst_strides.block);
    }
  }

  std::vector<int64_t> cuts{0, kIds * kPlanes};
  for (int i = 0; i < 6; ++i) cuts.push_back(random() % (kIds * kPlanes));
  std::sort(cuts.begin(), cuts.end());
  std::vector<size_t> parts;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) parts.push_back(i);
  std::shuffle(parts.begin(), parts.end(), random);
  CopyBlocksParams into_part = p;
  for (const size_t part : parts) {
    std::vector<char> copied(kBytes, 0);
    for (int64_t i = 0; i < kPlanes; ++i) {
      into_part.planes[i].dst = copied.data() + (p.planes[i].dst - dst.data());
    }
    copy_blocks_host(into_part, cuts[part], cuts[part + 1]);
    for (int64_t i = 0; i < kBytes; ++i) dst[i] += copied[i];  // twice would be too much
  }
  EXPECT(dst == want);
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 5; ++seed) {
    check(kApart, kApart, seed);
    check(kApart, kWithin, seed);
    check(kWithin, kApart, seed);
    check(kWithin, kWithin, seed);
  }
  return failures() > 0;
}
