#include "mask/block_map.h"

#include <algorithm>

namespace mk::mask {
namespace {

// State carried from one window of a q-block to the next.
struct Walk {
  int32_t touching = 0;  // rows, at the window's last tile
  int32_t covering = 0;
  int64_t num_any = 0;
  int64_t num_full = 0;
  TileRanges ranges;
};

struct Counters {
  int32_t touches[kWindow + 1];
  int32_t covers[kWindow + 1];
};

void list_tile(const BlockMapParams& p, int64_t index, int64_t tile, bool is_full,
               int64_t* num_listed) {
  for (int32_t i = 0; i < p.num_lists; ++i) {
    const TileList& list = p.lists[i];
    if (!list.has(is_full)) continue;
    const int64_t at = list.begin(index) + num_listed[i]++;
    if (at < list.end(index)) list.indices[at] = static_cast<int32_t>(tile);
  }
}

void fill_q_block(const BlockMapParams& p, int64_t index, const QBlock& block) {
  const auto add = [](int32_t* to, int32_t value) { *to += value; };
  Walk walk;
  int64_t num_listed[kMaxLists] = {};
  for (int64_t first = 0; first < block.num_tiles && block.num_rows > 0; first += kWindow) {
    Counters counters{};
    for (int64_t r = 0; r < block.num_rows; ++r) {
      p.count_row(block, block.first_row + r, first, counters.touches, counters.covers, add);
    }
    walk.touching = walk.covering = 0;
    const int64_t end = std::min<int64_t>(kWindow, block.num_tiles - first);
    for (int64_t word = 0; word < end; word += 32) {
      uint32_t any = 0, full = 0;
      for (int64_t t = word; t < std::min(word + 32, end); ++t) {
        walk.touching += counters.touches[t];
        walk.covering += counters.covers[t];
        if (walk.touching == 0) continue;
        const bool is_full = walk.covering == block.num_rows && p.can_be_full(block);
        any |= uint32_t{1} << (t - word);
        full |= uint32_t{is_full} << (t - word);
        list_tile(p, index, first + t, is_full, num_listed);
      }
      walk.ranges.add(first + word, any, full);
      walk.num_any += count_ones(any);
      walk.num_full += count_ones(full);
    }
  }
  p.store(index, walk.ranges, walk.num_any, walk.num_full);
}

}  // namespace

void fill_cu_q_blocks(const BlockMapParams& params) {
  if (!params.cu_q_blocks) return;
  int64_t sum = 0;
  for (int64_t b = 0; b <= params.rows.lengths.num_requests; ++b) {
    params.cu_q_blocks[b] = static_cast<int32_t>(sum);
    if (b < params.rows.lengths.num_requests) sum += params.num_blocks_of(b);
  }
}

void block_map_host(const BlockMapParams& params, int64_t begin, int64_t end) {
  const int64_t num_requests = params.rows.lengths.num_requests;
  int64_t request = 0, first = 0;  // of the request's q-blocks
  for (int64_t index = begin; index < end; ++index) {
    for (; request < num_requests && index >= first + params.num_blocks_of(request); ++request) {
      first += params.num_blocks_of(request);
    }
    const bool exists = request < num_requests;
    fill_q_block(params, index, exists ? params.block_of(request, index - first) : QBlock{});
  }
}

}  // namespace mk::mask
