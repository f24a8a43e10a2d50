// The checksum of a block: a sum, so that terms may be added by any thread in any order.
//
//   sum over rows r in packed order, over words w of a row:
//     checksum_term(word, first_word + r * words_per_row + w)
//
// modulo 2^64. A row is one vector of `dim` elements; its words are 8 bytes, little endian, the
// last one padded with zeros. Packed order is [layer, kv, head, token], so that equal blocks of
// caches with different layouts have equal sums. Each term includes the position: correct data in
// the wrong place changes the sum. For a given position, a term is a bijection of its word, so a
// single flipped bit is always detected. It guards against faults, not against forgery.
// Layer: common.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/hd.h"

namespace mk {

constexpr int64_t kWordBytes = 8;

MK_HD int64_t words_of(int64_t num_bytes) { return (num_bytes + kWordBytes - 1) / kWordBytes; }

MK_HD uint64_t checksum_term(uint64_t word, uint64_t index) {
  const uint64_t key = (index * 0x9e3779b97f4a7c15u + 0xd1b54a32d192ed03u) | 1;
  const uint64_t product = ((word ^ word >> 32) + 0x8cb92ba72f3d8dd7u) * key;
  return product ^ product >> 32;
}

MK_HD uint64_t checksum_bytes(const char* bytes, int64_t num_bytes, uint64_t index) {
  uint64_t sum = 0;
  int64_t i = 0;
  for (; i + kWordBytes <= num_bytes; i += kWordBytes, ++index) {
    uint64_t word;
    memcpy(&word, bytes + i, kWordBytes);
    sum += checksum_term(word, index);
  }
  if (i == num_bytes) return sum;
  uint64_t last = 0;
  for (int64_t k = 0; i + k < num_bytes; ++k) {
    last |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i + k])) << 8 * k;
  }
  return sum + checksum_term(last, index);
}

}  // namespace mk
