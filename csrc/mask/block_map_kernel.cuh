// The device code of block_map: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "mask/block_map.h"

namespace mk::mask {

constexpr int kMapThreads = 128;
constexpr int kTilesPerThread = kWindow / kMapThreads;  // a byte of bits
static_assert(kTilesPerThread == 8);

struct Pair {
  int32_t first;
  int32_t second;
};

// Shared by the threads of a block: one window of one q-block.
struct MapShared {
  QBlock block;
  int32_t touches[kWindow + 1];
  int32_t covers[kWindow + 1];
  Pair sums[kMapThreads];
  uint8_t any[kMapThreads];  // bit i of byte t: tile 8 * t + i of the window
  uint8_t full[kMapThreads];
};

// The sum of the pairs of all threads before this one; the total is left in the last of sums.
__device__ inline Pair sum_before(MapShared& shared, Pair mine) {
  const int thread = static_cast<int>(threadIdx.x);
  shared.sums[thread] = mine;
  __syncthreads();
  for (int distance = 1; distance < kMapThreads; distance *= 2) {
    Pair before{0, 0};
    if (thread >= distance) before = shared.sums[thread - distance];
    __syncthreads();
    shared.sums[thread].first += before.first;
    shared.sums[thread].second += before.second;
    __syncthreads();
  }
  const Pair with_mine = shared.sums[thread];
  return {with_mine.first - mine.first, with_mine.second - mine.second};
}

// Finds the block's q-block, using all threads, so that no host needs to sum up the lengths first.
// The first block also writes the start of each request's q-blocks.
__device__ inline void find_q_block(const BlockMapParams& p, MapShared& shared, int64_t index) {
  const int64_t num_requests = p.rows.lengths.num_requests;
  const int64_t each = ceil_div(num_requests, kMapThreads), begin = threadIdx.x * each;
  const int64_t end = begin + each < num_requests ? begin + each : num_requests;
  int32_t sum = 0;
  for (int64_t b = begin; b < end; ++b) sum += static_cast<int32_t>(p.num_blocks_of(b));
  if (threadIdx.x == 0) shared.block = QBlock{};
  int32_t first = sum_before(shared, {sum, 0}).first;
  const bool writes = index == 0 && p.cu_q_blocks;
  if (writes && threadIdx.x == 0) p.cu_q_blocks[0] = 0;
  for (int64_t b = begin; b < end; ++b) {
    const auto after = static_cast<int32_t>(first + p.num_blocks_of(b));
    if (first <= index && index < after) shared.block = p.block_of(b, index - first);
    if (writes) p.cu_q_blocks[b + 1] = after;
    first = after;
  }
  __syncthreads();
}

// Counts the rows that touch and cover each tile of the window.
__device__ inline void count_window(const BlockMapParams& p, MapShared& shared, int64_t first) {
  for (int i = static_cast<int>(threadIdx.x); i <= kWindow; i += kMapThreads) {
    shared.touches[i] = shared.covers[i] = 0;
  }
  __syncthreads();
  const auto add = [](int32_t* to, int32_t value) { atomicAdd(to, value); };
  for (int64_t r = threadIdx.x; r < shared.block.num_rows; r += kMapThreads) {
    p.count_row(shared.block, shared.block.first_row + r, first, shared.touches, shared.covers,
                add);
  }
  __syncthreads();
}

// The classes of this thread's tiles of the window, as bits.
__device__ inline void classify(const BlockMapParams& p, MapShared& shared, int64_t first) {
  const int begin = static_cast<int>(threadIdx.x) * kTilesPerThread;
  Pair sum{0, 0};
  for (int i = begin; i < begin + kTilesPerThread; ++i) {
    sum.first += shared.touches[i];
    sum.second += shared.covers[i];
  }
  Pair rows = sum_before(shared, sum);
  uint32_t any = 0, full = 0;
  for (int i = 0; i < kTilesPerThread; ++i) {
    rows.first += shared.touches[begin + i];
    rows.second += shared.covers[begin + i];
    const bool exists = first + begin + i < shared.block.num_tiles;
    const bool is_any = exists && rows.first > 0;
    const bool is_full =
        is_any && rows.second == shared.block.num_rows && p.can_be_full(shared.block);
    any |= uint32_t{is_any} << i;
    full |= uint32_t{is_full} << i;
  }
  shared.any[threadIdx.x] = static_cast<uint8_t>(any);
  shared.full[threadIdx.x] = static_cast<uint8_t>(full);
}

// Writes this thread's tiles of a list's kinds; `listed` is their number before the window.
__device__ inline void list_window(const MapShared& shared, const TileList& list, int64_t index,
                                   int64_t first, Pair listed) {
  const uint32_t any = shared.any[threadIdx.x], full = shared.full[threadIdx.x];
  const bool partials = list.has(false), fulls = list.has(true);
  const int64_t end = list.end(index);
  int64_t at = list.begin(index) + (partials ? listed.first : 0) + (fulls ? listed.second : 0);
  const uint32_t chosen = (partials ? any & ~full : 0) | (fulls ? full : 0);
  for (int i = 0; i < kTilesPerThread; ++i) {
    if (!(chosen >> i & 1) || at >= end) continue;
    const int64_t tile = first + int64_t{threadIdx.x} * kTilesPerThread + i;
    list.indices[at++] = static_cast<int32_t>(tile);
  }
}

// Assembles a word of tiles from four bytes, independent of the byte order.
__device__ inline uint32_t word_of(const uint8_t* bytes) {
  return uint32_t{bytes[0]} | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 |
         uint32_t{bytes[3]} << 24;
}

// One block per q-block. Its first thread alone accumulates the ranges, 32 words per window.
__global__ void __launch_bounds__(kMapThreads)
    block_map_kernel(const __grid_constant__ BlockMapParams p) {
  __shared__ MapShared shared;
  const int64_t index = blockIdx.x;
  find_q_block(p, shared, index);
  if (index >= p.num_q_blocks) return;
  TileRanges ranges;
  Pair before{0, 0};  // partial and full tiles of earlier windows
  const int64_t num_tiles = shared.block.num_rows > 0 ? shared.block.num_tiles : 0;
  for (int64_t first = 0; first < num_tiles; first += kWindow) {
    count_window(p, shared, first);
    classify(p, shared, first);
    const uint32_t any = shared.any[threadIdx.x], full = shared.full[threadIdx.x];
    const Pair mine{count_ones(any & ~full), count_ones(full)};
    const Pair listed = sum_before(shared, mine);  // its barriers make all bits visible
    for (int32_t i = 0; i < p.num_lists; ++i) {
      list_window(shared, p.lists[i], index, first,
                  {before.first + listed.first, before.second + listed.second});
    }
    if (threadIdx.x == 0) {
      for (int word = 0; word < kMapThreads / 4; ++word) {
        ranges.add(first + 32 * word, word_of(shared.any + 4 * word),
                   word_of(shared.full + 4 * word));
      }
    }
    before.first += shared.sums[kMapThreads - 1].first;
    before.second += shared.sums[kMapThreads - 1].second;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.store(index, ranges, before.first + before.second, before.second);
}

}  // namespace mk::mask
