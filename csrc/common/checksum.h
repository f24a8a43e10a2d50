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

constexpr uint64_t kKeyStep = 0x9e3779b97f4a7c15u;  // between the keys of two words in a row

MK_HD uint64_t checksum_key(uint64_t index) { return index * kKeyStep + 0xd1b54a32d192ed03u; }

// Adds the term of a word, or those of a vector of them.
template <class Words>
MK_HD void add_checksum_term(Words& sum, const Words& word, const Words& key) {
  const Words product = ((word ^ word >> 32) + 0x8cb92ba72f3d8dd7u) * (key | 1);
  sum += product ^ product >> 32;
}

MK_HD uint64_t checksum_term(uint64_t word, uint64_t index) {
  uint64_t term = 0;
  add_checksum_term(term, word, checksum_key(index));
  return term;
}

MK_HD uint64_t checksum_bytes(const char* bytes, int64_t num_bytes, uint64_t index) {
  uint64_t sum = 0, key = checksum_key(index);  // stepped: a product less for each word
  int64_t i = 0;
  for (; i + kWordBytes <= num_bytes; i += kWordBytes, key += kKeyStep) {
    uint64_t word;
    memcpy(&word, bytes + i, kWordBytes);
    add_checksum_term(sum, word, key);
  }
  if (i == num_bytes) return sum;
  uint64_t last = 0;
  for (int64_t k = 0; i + k < num_bytes; ++k) {
    last |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i + k])) << 8 * k;
  }
  add_checksum_term(sum, last, key);
  return sum;
}

}  // namespace mk
