// copy_bulk_kernel on the CPU, with copies in the place of the instructions that are as late as
// they may be: a load comes when its barrier is waited for, a store reads its stage when that is
// waited for. And the arithmetic of the ring.
#include <array>
#include <deque>

#include "emulator/cuda_on_cpu.h"
#include "expect.h"
#include "kv/copy_bulk_kernel.cuh"

namespace {

using namespace mk::kv;

struct Load {
  char* stage;
  const char* src;
  int32_t num_bytes;
  uint64_t* barrier;
};
struct Store {
  char* dst;
  const char* stage;
  int32_t num_bytes;
};

// What a thread block has under way. A barrier is how many phases it has completed.
struct LateBulk {
  static inline std::array<char, kRingBytes> memory;
  static inline std::deque<Load> loads;
  static inline std::deque<Store> stores;
  static inline bool is_fenced;
  static inline int num_blocks, most_loads;

  static char* stages() {
    EXPECT(loads.empty() && stores.empty());
    memory.fill(0x55);
    is_fenced = false;
    ++num_blocks;
    return memory.data();
  }
  static void make_barrier(uint64_t* barrier) { *barrier = 0; }
  static void fence_barriers() { is_fenced = true; }

  static void load(char* stage, const char* src, int32_t num_bytes, uint64_t* barrier) {
    EXPECT(is_fenced && num_bytes > 0 && num_bytes % kBulkAlignment == 0);
    EXPECT((reinterpret_cast<uintptr_t>(src) | (stage - memory.data())) % kBulkAlignment == 0);
    EXPECT(stage >= memory.data() && stage + num_bytes <= memory.data() + memory.size());
    for (const Load& other : loads) EXPECT(other.barrier != barrier);  // a phase is for one load
    for (const Store& store : stores) EXPECT(store.stage != stage);    // still to be read
    loads.push_back({stage, src, num_bytes, barrier});
    most_loads = std::max<int>(most_loads, loads.size());
    std::memset(stage, 0x66, num_bytes);  // a load may write at any time from now on
  }

  // Parity of the phase: that one has completed if the next one is odd and it is even, or so.
  static void wait(uint64_t* barrier, uint32_t parity) {
    if (*barrier % 2 == parity) {  // not yet: the load of this barrier has to come
      const auto is_its = [barrier](const Load& load) { return load.barrier == barrier; };
      const auto load = std::find_if(loads.begin(), loads.end(), is_its);
      EXPECT(load != loads.end());  // else it would wait for ever
      if (load == loads.end()) std::abort();
      std::memcpy(load->stage, load->src, load->num_bytes);
      loads.erase(load);
      ++*barrier;
    } else {
      EXPECT(false);  // it would have gone on with what an earlier load has left
    }
  }

  static void store(char* dst, const char* stage, int32_t num_bytes) {
    stores.push_back({dst, stage, num_bytes});
  }
  template <int kPending>
  static void wait_for_reads() {
    for (; stores.size() > kPending; stores.pop_front()) {
      const Store& store = stores.front();
      std::memcpy(store.dst, store.stage, store.num_bytes);
    }
  }
  static void wait_for_writes() { wait_for_reads<0>(); }
};

void check_arithmetic() {
  for (const int64_t run_bytes : {16, 48, 4096, 32768, 32784, 100000, 1 << 20}) {
    const BulkRing ring = make_ring(run_bytes, 5);
    EXPECT(ring.num_stages >= kStoresInFlight + 2 && ring.num_stages <= kMaxStages);
    EXPECT(int64_t{ring.num_stages} * ring.stage_bytes <= kRingBytes);
    EXPECT(ring.stage_bytes % kBulkAlignment == 0);
    int64_t end = 0;
    for (int64_t chunk = 0; chunk < ring.num_chunks; ++chunk) {
      EXPECT(ring.run(chunk) * run_bytes + ring.offset(chunk) == end);
      EXPECT(ring.num_bytes(chunk) > 0 && ring.num_bytes(chunk) <= ring.stage_bytes);
      end += ring.num_bytes(chunk);
    }
    EXPECT(end == 5 * run_bytes);
    EXPECT(ring.stage(ring.num_stages) == 0 && ring.stage(ring.num_stages - 1) != 0);
    EXPECT(ring.parity(ring.num_stages - 1) == 0 && ring.parity(ring.num_stages) == 1);
    EXPECT(ring.parity(2 * int64_t{ring.num_stages}) == 0);
  }
}

// Blocks of `kRuns` runs, `gap` bytes apart in src.
void check(int64_t run_bytes, unsigned grid, const std::vector<int64_t>& src_ids,
           const std::vector<int32_t>& dst_ids, int64_t bad_side = 0) {
  constexpr int64_t kBlocks = 40, kRuns = 3, kGap = 32;
  const int64_t step = run_bytes + kGap;
  std::vector<char> src(kBlocks * kRuns * step + 16), dst(kBlocks * kRuns * run_bytes + 16, 0x77);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 2654435761u >> 13);
  const auto aligned = [](std::vector<char>& bytes) {
    return bytes.data() + (16 - reinterpret_cast<uintptr_t>(bytes.data()) % 16) % 16;
  };
  CopyBlocksParams p{};
  p.src = {src_ids.data(), true, kBlocks, kRuns * step, 1, 0, 1, 0};
  p.dst = {dst_ids.data(), false, kBlocks, kRuns * run_bytes, 1, 0, 1, 0};
  p.num_pieces = static_cast<int64_t>(src_ids.size());
  p.run_bytes = run_bytes;
  p.axes[0] = {kRuns, step, run_bytes};
  p.axes[1] = {1, 0, 0};
  p.num_planes = 1;
  p.planes[0] = {aligned(src), aligned(dst)};
  std::vector<char> want = dst;
  for (size_t i = 0; i < src_ids.size(); ++i) {
    if (p.check(i).side != 0 || src_ids[i] == kHole || dst_ids[i] == kHole) continue;
    for (int64_t r = 0; r < kRuns; ++r) {
      std::copy_n(
          aligned(src) + (src_ids[i] * kRuns + r) * step, run_bytes,
          want.begin() + (aligned(dst) - dst.data()) + (dst_ids[i] * kRuns + r) * run_bytes);
    }
  }
  BadId bad{};
  LateBulk::num_blocks = LateBulk::most_loads = 0;
  const BulkRing ring = make_ring(run_bytes, p.num_runs());
  emu::run(copy_bulk_kernel<LateBulk>, {grid, 32}, p, ring, &bad);
  EXPECT(dst == want && bad.side == bad_side);
  EXPECT(LateBulk::num_blocks == static_cast<int>(grid));
  EXPECT(LateBulk::loads.empty() && LateBulk::stores.empty());
  EXPECT(LateBulk::most_loads <= ring.num_stages);
}

}  // namespace

int main() {
  check_arithmetic();
  std::vector<int64_t> src_ids;
  std::vector<int32_t> dst_ids;
  for (int i = 0; i < 40; ++i) {
    src_ids.push_back(i % 7 == 3 ? kHole : (i * 17 + 5) % 40);
    dst_ids.push_back(i % 11 == 6 ? static_cast<int32_t>(kHole) : (i * 23 + 1) % 40);
  }
  for (const int64_t run_bytes : {16, 48, 656, 4096, 40000}) {
    for (const unsigned grid : {1u, 2u, 7u}) {
      check(run_bytes, grid, src_ids, dst_ids);
      check(run_bytes, grid, {}, {});
      check(run_bytes, grid, {kHole}, {0});
      for (int n = 1; n <= 4; ++n) {  // less than a ringful, for the longer runs
        check(run_bytes, grid, {src_ids.begin(), src_ids.begin() + n},
              {dst_ids.begin(), dst_ids.begin() + n});
      }
      check(run_bytes, grid, {1, 40, 2}, {3, 4, 5}, 1);
      check(run_bytes, grid, {1, 4, 2}, {3, -2, 5}, 2);
    }
  }
  return failures();
}
