// The keys that a query sees: csrc/attention's view of a mask's rows, see mask/mask_rows.py.
//
//   TileRange range(mask, first_query, num_queries, request);
//   for (int64_t key = range.next(begin); key < end; key = range.next(key + kMaskKeys)) {
//     if (range.is_full(key)) ...; else ... mask.bits(query, request, key) ...;
//   }
//
// Layer: attention.
#pragma once

#include <cstdint>

namespace mk::attention {

constexpr int64_t kMaskKeys = 64;

struct RowMask {
  const int32_t* intervals;  // [num_q][4]: lo0, hi0, lo1, hi1
  const int64_t* tail_bits;  // [num_q]
  const int32_t* tail_base;  // [num_requests]
  const int32_t* cu_q;       // [num_requests + 1]
  const int32_t* kv_lens;    // [num_requests]

  // Bit j: whether the query sees key + j.
  uint64_t bits(int64_t query, int64_t request, int64_t key) const {
    const int32_t* i = intervals + query * 4;
    const uint64_t inside = below(i[1] - key) & ~below(i[0] - key);
    const uint64_t second = below(i[3] - key) & ~below(i[2] - key);
    const int64_t shift = tail_base[request] - key;
    const auto tail = static_cast<uint64_t>(tail_bits[query]);
    const bool overlaps = shift > -kMaskKeys && shift < kMaskKeys;
    const uint64_t moved = !overlaps ? 0 : shift >= 0 ? tail << shift : tail >> -shift;
    return (inside | second | moved) & below(kv_lens[request] - key);
  }

  // The lowest `count` bits; `count` may be negative or exceed the word.
  static uint64_t below(int64_t count) {
    if (count <= 0) return 0;
    return count >= kMaskKeys ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  }
};

constexpr int64_t kNoKey = INT64_MAX;

struct KeyRange {
  int64_t begin;
  int64_t end;
};

// The keys of some queries, as ranges: a key outside `any` is seen by none of them, and a key
// inside one of `all` by every one.
class TileRange {
 public:
  TileRange(const RowMask& mask, int64_t first_query, int64_t num_queries, int64_t request) {
    uint64_t tail = 0;
    for (KeyRange& range : all_) range.end = mask.kv_lens[request];
    for (int64_t query = first_query; query < first_query + num_queries; ++query) {
      add(mask.intervals + query * 4, 0);
      add(mask.intervals + query * 4 + 2, 1);
      tail |= static_cast<uint64_t>(mask.tail_bits[query]);
    }
    const int64_t base = mask.tail_base[request];
    if (tail) any_[2] = {base, base + kMaskKeys};
  }

  // The first multiple of kMaskKeys >= key at which a tile begins that may be seen; kNoKey if there
  // is none.
  int64_t next(int64_t key) const {
    int64_t found = kNoKey;
    for (const KeyRange& range : any_) {
      if (range.begin >= range.end || key >= range.end) continue;
      const int64_t tile = range.begin > key ? range.begin / kMaskKeys * kMaskKeys : key;
      if (tile < found) found = tile;
    }
    return found;
  }

  bool is_full(int64_t key) const {
    for (const KeyRange& range : all_) {
      if (key >= range.begin && key + kMaskKeys <= range.end) return true;
    }
    return false;
  }

 private:
  void add(const int32_t* interval, int which) {
    const int64_t begin = interval[0], end = interval[1];
    KeyRange& all = all_[which];
    all.begin = begin > all.begin ? begin : all.begin;
    all.end = end < all.end ? end : all.end;
    if (begin == end) return;
    KeyRange& any = any_[which];
    any.begin = begin < any.begin ? begin : any.begin;
    any.end = end > any.end ? end : any.end;
  }

  KeyRange any_[3] = {{kNoKey, 0}, {kNoKey, 0}, {kNoKey, 0}};
  KeyRange all_[2] = {};
};

}  // namespace mk::attention
