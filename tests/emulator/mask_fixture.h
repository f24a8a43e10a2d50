// Random rows in their canonical form, and which pairs they are, one by one.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "mask/mask_row.h"

struct MaskFixture {
  std::vector<int32_t> intervals, cu_q{0}, kv_lens, tail_base;
  std::vector<int64_t> tail_bits;

  // Every third row is causal, every third the same all through, the others are anything: tiles of
  // all three classes, and tails.
  MaskFixture(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& keys, unsigned seed)
      : kv_lens(keys) {
    std::mt19937 random(seed);
    for (size_t b = 0; b < q_lens.size(); ++b) {
      cu_q.push_back(cu_q.back() + q_lens[b]);
      const int32_t kv_len = keys[b], tail = std::min(kv_len, b % 2 ? 0 : 40);
      tail_base.push_back(kv_len - tail);
      for (int32_t i = 0; i < q_lens[b]; ++i) add_row(i, kv_len, tail, random);
    }
  }

  mk::mask::MaskRowsView view() const {
    return {intervals.data(),
            tail_bits.data(),
            tail_base.data(),
            {cu_q.data(), kv_lens.data(), static_cast<int64_t>(kv_lens.size())}};
  }

  bool sees(int64_t row, int64_t request, int64_t key) const {
    const int32_t* at = intervals.data() + 4 * row;
    const int64_t bit = key - tail_base[request];
    return (at[0] <= key && key < at[1]) || (at[2] <= key && key < at[3]) ||
           (0 <= bit && bit < 64 && (static_cast<uint64_t>(tail_bits[row]) >> bit & 1));
  }

 private:
  void add_row(int32_t i, int32_t kv_len, int32_t tail, std::mt19937& random) {
    const auto below = [&](int32_t n) { return n > 0 ? static_cast<int32_t>(random() % n) : 0; };
    std::vector<int32_t> row{0, 0, 0, 0};
    uint64_t bits = 0;
    if (i % 3 == 0) {
      row[1] = kv_len * 3 / 4;
    } else if (kv_len > 8) {
      int32_t ends[4];
      for (int32_t& end : ends) end = below(kv_len - 1);
      std::sort(ends, ends + 4);
      row = {ends[0] / 4, ends[1] / 2 + 1, ends[1] / 2 + 2, ends[3] + 2};
      if (row[2] >= row[3]) row[2] = row[3] = 0;
      const int32_t used = std::max(row[1], row[3]) - (kv_len - tail);
      if (row[3] > 0 && tail > 0 && used < tail - 1) {
        const int64_t from = std::max(used + 1, 0);
        bits = (uint64_t{random()} << 13 ^ random()) & mk::mask::bits_between(from, tail);
      }
    }
    intervals.insert(intervals.end(), row.begin(), row.end());
    tail_bits.push_back(static_cast<int64_t>(bits));
  }
};
