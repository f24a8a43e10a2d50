// packed_mask: a mask as one bit per pair, in FlashInfer's form, without an intermediate dense
// mask.
//
//   bit i of request b is pair (i / kv_len, i % kv_len), query and key; bits start from the lowest
//   of a byte, rows follow each other without a gap, and each request begins at a new byte, at
//   indptr[b]
//
// The bits come from rows in canonical form, or from a rule, however many runs its rows need.
// Layer: mask. Python: mooncake_kernels/mask/packed.py.
#pragma once

#include <cstdint>

#include "mask/mask_row.h"
#include "mask/mask_rows.h"

namespace mk::mask {

// Bits of rows in canonical form.
struct BitsOfRows {
  MaskRowsView rows;

  MK_HD const BatchLengths& lengths() const { return rows.lengths; }
  // Bit i: whether the row sees key first + i.
  MK_HD uint64_t bits(int64_t row, int64_t request, int64_t first) const {
    return rows.row(row, request).bits_from(first);
  }
};

// Bits of any rule: evaluates it on words of 64 keys.
struct BitsOfRule {
  MaskRowsParams params;  // outputs are unused

  MK_HD const BatchLengths& lengths() const { return params.lengths; }
  MK_HD uint64_t bits(int64_t row, int64_t request, int64_t first) const {
    const RuleRow rule = params.rule_row(row, request);
    if (!rule.has_position()) return 0;
    return evaluate<uint64_t>(rule, [&](const LeafKeys& leaf) {
      return bits_between(leaf.begin0 - first, leaf.end0 - first) |
             bits_between(leaf.begin1 - first, leaf.end1 - first) |
             shifted(leaf.drafts, leaf.draft_base - first);
    });
  }
};

template <class Source>
struct PackedMaskParams {
  Source source;
  const int64_t* indptr;  // [num_requests + 1], bytes
  int64_t num_words;      // of the output: 0 after the last indptr
  uint8_t* packed;

  MK_HD int64_t request_of_byte(int64_t byte) const {
    int64_t low = 0, high = source.lengths().num_requests;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      indptr[middle + 1] <= byte ? low = middle + 1 : high = middle;
    }
    return low;
  }

  // One byte of the result, which may contain the ends of several rows.
  MK_HD uint8_t byte(int64_t index, int64_t request) const {
    const BatchLengths& lengths = source.lengths();
    const int64_t kv_len = lengths.kv_lens[request];
    const int64_t num_bits = lengths.q_len(request) * kv_len;
    int64_t bit = 8 * (index - indptr[request]);
    int64_t row = bit / kv_len, key = bit % kv_len;
    uint32_t result = 0;
    for (int filled = 0; filled < 8 && bit < num_bits; ++row, key = 0) {
      int64_t n = kv_len - key;
      if (n > 8 - filled) n = 8 - filled;
      const uint64_t bits = source.bits(lengths.cu_q[request] + row, request, key);
      result |= static_cast<uint32_t>(bits & bits_between(0, n)) << filled;
      filled += static_cast<int>(n);
      bit += n;
    }
    return static_cast<uint8_t>(result);
  }

  // The pair of a word's first bit.
  struct Place {
    int64_t request;
    int64_t row;  // of the batch
    int64_t key;
    int64_t kv_len;
    bool is_row;  // false: in the padding after the request's last row

    // The number of words within that row, from this one on.
    MK_HD int64_t num_words() const { return is_row ? (kv_len - key) / 32 : 0; }
  };

  // For a word that begins before the last indptr.
  MK_HD Place place(int64_t index) const {
    const BatchLengths& lengths = source.lengths();
    const int64_t request = request_of_byte(4 * index), kv_len = lengths.kv_lens[request];
    const int64_t bit = 8 * (4 * index - indptr[request]), row = bit / kv_len;
    return {request, lengths.cu_q[request] + row, bit % kv_len, kv_len,
            row < lengths.q_len(request)};
  }

  // The four bytes at 4 * index, which usually lie in one row.
  MK_HD uint32_t word(int64_t index) const {
    const int64_t first = 4 * index, num_bytes = indptr[source.lengths().num_requests];
    if (first >= num_bytes) return 0;
    const Place at = place(index);
    if (at.num_words() > 0) return static_cast<uint32_t>(source.bits(at.row, at.request, at.key));
    uint32_t result = 0;
    for (int i = 0; i < 4 && first + i < num_bytes; ++i) {
      result |= uint32_t{byte(first + i, request_of_byte(first + i))} << (8 * i);
    }
    return result;
  }
};

// Words [begin, end), on the calling thread.
template <class Source>
void packed_mask_host(const PackedMaskParams<Source>& params, int64_t begin, int64_t end);

// All words, in one launch on `stream` (a cudaStream_t) of the current device. Throws CudaError.
template <class Source>
void launch_packed_mask(const PackedMaskParams<Source>& params, void* stream);

}  // namespace mk::mask
