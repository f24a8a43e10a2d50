#include "mask/packed_mask.h"

#include <algorithm>
#include <cstring>

namespace mk::mask {
namespace {

void store(uint8_t* words, int64_t index, uint32_t word) {
  std::memcpy(words + 4 * index, &word, sizeof(word));
}

void set_bits(uint8_t* bytes, int64_t begin, int64_t end) {
  if (begin >= end) return;
  const int64_t first = begin / 8, last = (end - 1) / 8;
  const int head = 0xff << begin % 8 & 0xff, tail = 0xff >> (7 - (end - 1) % 8);
  if (first == last) {
    bytes[first] |= static_cast<uint8_t>(head & tail);
    return;
  }
  bytes[first] |= static_cast<uint8_t>(head);
  std::memset(bytes + first + 1, 0xff, static_cast<size_t>(last - first - 1));
  bytes[last] |= static_cast<uint8_t>(tail);
}

// Makes n words of one row, starting at the key of `at`.
template <class Place>
void fill(const BitsOfRows& source, const Place& at, int64_t n, uint8_t* words) {
  std::memset(words, 0, static_cast<size_t>(4 * n));
  source.rows.row(at.row, at.request).for_each_run([&](int64_t begin, int64_t end) {
    set_bits(words, std::max<int64_t>(begin - at.key, 0), std::min(end - at.key, 32 * n));
  });
}

template <class Place>
void fill(const BitsOfRule& source, const Place& at, int64_t n, uint8_t* words) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t bits = source.bits(at.row, at.request, at.key + 32 * i);
    store(words, i, static_cast<uint32_t>(bits));
  }
}

}  // namespace

// Finding a word's place takes longer than making the word, so the words of one row are made
// together.
template <class Source>
void packed_mask_host(const PackedMaskParams<Source>& params, int64_t begin, int64_t end) {
  const int64_t num_bytes = params.indptr[params.source.lengths().num_requests];
  for (int64_t i = begin; i < end;) {
    int64_t n = 0;
    if (4 * i < num_bytes) {
      const auto at = params.place(i);
      n = std::min(at.num_words(), end - i);
      fill(params.source, at, n, params.packed + 4 * i);
    }
    if (n == 0) store(params.packed, i, params.word(i));
    i += std::max<int64_t>(n, 1);
  }
}

template void packed_mask_host(const PackedMaskParams<BitsOfRows>&, int64_t, int64_t);
template void packed_mask_host(const PackedMaskParams<BitsOfRule>&, int64_t, int64_t);

}  // namespace mk::mask
