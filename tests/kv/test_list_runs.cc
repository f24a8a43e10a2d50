// list_runs compared with copy_blocks_host, through the copy engine of a driver that is made up.
#include "kv/list_runs.h"

#include <dlfcn.h>

#include <vector>

#include "expect.h"
#include "kv/copy_engine.h"
#include "kv/fake_cuda_driver.h"

namespace {

using namespace mk::kv;

constexpr int64_t kBlocks = 6, kTokens = 3, kHeads = 2, kDim = 5;
constexpr int64_t kBlockBytes = kTokens * kHeads * kDim, kPlaneBytes = kBlocks * kBlockBytes;
constexpr int kPlanes = 2;

struct Caches {
  std::vector<char> src = std::vector<char>(kPlanes * kPlaneBytes), dst, want;

  Caches() : dst(src.size(), 0x77), want(dst) {
    for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 2654435761u >> 13);
  }

  // [block, token, head, dim] into the same, or into [block, head, token, dim].
  CopyBlocksParams params(std::vector<char>& to, const std::vector<int64_t>& src_ids,
                          const std::vector<int32_t>& dst_ids, bool transposed) const {
    CopyBlocksParams p{};
    p.src = {src_ids.data(), true, kBlocks, kBlockBytes, 1, 0, 1, 0};
    p.dst = {dst_ids.data(), false, kBlocks, kBlockBytes, 1, 0, 1, 0};
    p.num_pieces = static_cast<int64_t>(src_ids.size());
    p.run_bytes = transposed ? kDim : kBlockBytes;
    p.axes[0] = p.axes[1] = {1, 0, 0};
    if (transposed) {
      p.axes[0] = {kTokens, kHeads * kDim, kDim};
      p.axes[1] = {kHeads, kDim, kTokens * kDim};
    }
    p.num_planes = kPlanes;
    for (int i = 0; i < kPlanes; ++i) {
      p.planes[i] = {src.data() + i * kPlaneBytes, to.data() + i * kPlaneBytes};
    }
    return p;
  }
};

void check(const std::vector<int64_t>& src_ids, const std::vector<int32_t>& dst_ids,
           bool transposed, size_t num_ranges) {
  Caches caches;
  CopyBlocksParams p = caches.params(caches.want, src_ids, dst_ids, transposed);
  copy_blocks_host(p, 0, p.num_pieces * p.num_planes);
  p = caches.params(caches.dst, src_ids, dst_ids, transposed);
  std::vector<CopyRange> ranges;
  list_runs(p, ranges);
  EXPECT(ranges.size() == num_ranges);
  int stream = 0;
  copy_by_engine(ranges.data(), static_cast<int64_t>(ranges.size()), false, &stream);
  EXPECT(caches.dst == caches.want);
}

void check_joins() {
  char bytes[64];
  CopyRange range{bytes, bytes + 32, 8};
  EXPECT(join(range, {bytes + 8, bytes + 40, 8}) && range.num_bytes == 16);
  EXPECT(!join(range, {bytes + 16, bytes + 56, 8}) && !join(range, {bytes + 24, bytes + 48, 8}));
  EXPECT(join(range, {bytes + 16, bytes + 48, 16}) && range.num_bytes == 32);
  EXPECT(!join(range, {bytes + 32, bytes + 64, 8}));  // it would write what it reads
}

}  // namespace

int main() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  auto* const driver = library ? static_cast<FakeDriver*>(dlsym(library, "fake_driver")) : nullptr;
  EXPECT(driver);
  if (!driver) return failures();
  driver->is_initialized = true;
  driver->current = driver;
  check({}, {}, false, 0);
  check({4, 0, 2}, {1, 3, 5}, false, 3 * kPlanes);
  check({0, 1, 2, 5}, {2, 3, 4, 0}, false, 2 * kPlanes);      // three in a row, and one
  check({0, 1, 2, 3}, {2, 1, 4, 5}, false, 3 * kPlanes);      // in a row on both sides
  check({0, kHole, 1, 2}, {2, 0, 3, kHole}, false, kPlanes);  // on either side of a hole
  check({kHole}, {1}, false, 0);
  // Of rows that go elsewhere only the last one of a block is joined, with the first of the next.
  check({0, 1}, {0, 1}, true, kPlanes * (2 * kTokens * kHeads - 1));
  check_joins();
  return failures();
}
