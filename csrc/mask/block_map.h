// block_map: which tiles of a mask are full, partial or empty.
//
//   for q_block: for tile of its request:
//     full:    every row of the q-block sees every key of the tile
//     empty:   none sees any
//   partial: otherwise
//
// A row's runs do not touch, so it sees all of a tile if and only if one run covers the tile. Each
// run adds 1 to the tiles that it covers and to those that it touches, at their two ends (a
// difference array); a running sum then gives both counts of every tile. It works on windows of
// kWindow tiles, which fit the shared memory of a block, and walks the rows for each of them. That
// takes rows x windows + tiles steps, not rows x tiles. Layer: mask. Python:
// mooncake_kernels/mask/block_map.py.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "mask/mask_row.h"
#include "mask/tile_ranges.h"

namespace mk::mask {

constexpr int kWindow = 1024;
constexpr int kMaxLists = 3;
// Rows of a q-block. A row can touch a tile by 34 runs, two intervals and every other bit of a
// tail, and the counters are int32.
constexpr int64_t kMaxRows = INT32_MAX / 34;

// Bits, so that a list can hold both kinds.
enum TileKind : int32_t { kPartialTiles = 1, kFullTiles = 2 };

// The output list for tiles of some kinds: those of q-block i from indices[begin(i)] on, ascending,
// as far as there is room. The counts are complete.
struct TileList {
  int32_t* indices;
  int64_t size;
  const int64_t* begins;  // or null: rows of `width`
  int64_t width;
  int32_t kinds;

  MK_HD int64_t begin(int64_t index) const { return begins ? begins[index] : index * width; }
  MK_HD int64_t end(int64_t index) const { return begins ? size : (index + 1) * width; }
  MK_HD bool has(bool is_full) const { return kinds & (is_full ? kFullTiles : kPartialTiles); }
};

struct QBlock {
  int64_t request;
  int64_t first_row;
  int64_t num_rows;  // 0: past the end of the batch
  int64_t kv_len;
  int64_t num_tiles;
};

struct Tiles {
  int64_t begin;
  int64_t end;
};

struct BlockMapParams {
  MaskRowsView rows;
  int64_t block_q;
  int64_t block_kv;
  bool whole;  // a tile that extends beyond the last query or key is not full
  int64_t num_q_blocks;
  int32_t* cu_q_blocks;  // [num_requests + 1]; these three may be null
  int32_t* ranges;       // [num_q_blocks, 4]
  int32_t* counts;       // [num_q_blocks, 2], partial and full
  int32_t num_lists;
  TileList lists[kMaxLists];

  MK_HD int64_t num_blocks_of(int64_t request) const {
    return ceil_div(rows.lengths.q_len(request), block_q);
  }

  // The `local`-th q-block of a request.
  MK_HD QBlock block_of(int64_t request, int64_t local) const {
    const int64_t first = local * block_q, left = rows.lengths.q_len(request) - first;
    const int64_t kv_len = rows.lengths.kv_lens[request];
    return {request, rows.lengths.cu_q[request] + first, left < block_q ? left : block_q, kv_len,
            ceil_div(kv_len, block_kv)};
  }

  MK_HD Tiles touched(int64_t begin, int64_t end) const {
    return {begin / block_kv, ceil_div(end, block_kv)};
  }

  // A request's last tile may be partial in length; it is covered by a run that reaches its end.
  MK_HD Tiles covered(const QBlock& block, int64_t begin, int64_t end) const {
    const bool reaches_end = !whole && end == block.kv_len;
    return {ceil_div(begin, block_kv), reaches_end ? block.num_tiles : end / block_kv};
  }

  MK_HD bool can_be_full(const QBlock& block) const { return !whole || block.num_rows == block_q; }

  // Adds the runs of a row to the difference arrays of the tiles [first, first + kWindow), which
  // have one more entry than tiles. `add` may have to be atomic.
  template <class Add>
  MK_HD void count_row(const QBlock& block, int64_t row, int64_t first, int32_t* touches,
                       int32_t* covers, const Add& add) const {
    const auto add_tiles = [&](Tiles tiles, int32_t* to) {
      const int64_t begin = tiles.begin > first ? tiles.begin - first : 0;
      const int64_t end = tiles.end - first < kWindow ? tiles.end - first : kWindow;
      if (begin >= end) return;
      add(to + begin, 1);
      add(to + end, -1);
    };
    rows.row(row, block.request).for_each_run([&](int64_t begin, int64_t end) {
      add_tiles(touched(begin, end), touches);
      add_tiles(covered(block, begin, end), covers);
    });
  }

  MK_HD void store(int64_t index, const TileRanges& found, int64_t num_any,
                   int64_t num_full) const {
    if (ranges) found.store(ranges + 4 * index);
    if (!counts) return;
    counts[2 * index] = static_cast<int32_t>(num_any - num_full);
    counts[2 * index + 1] = static_cast<int32_t>(num_full);
  }
};

// Fills in the start of each request's q-blocks, if requested.
void fill_cu_q_blocks(const BlockMapParams& params);

// q-blocks [begin, end), on the calling thread.
void block_map_host(const BlockMapParams& params, int64_t begin, int64_t end);

// All q-blocks, in one launch on `stream` (a cudaStream_t) of the current device. Throws CudaError.
void launch_block_map(const BlockMapParams& params, void* stream);

}  // namespace mk::mask
