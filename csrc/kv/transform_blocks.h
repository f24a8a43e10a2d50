// transform_blocks: copy_blocks with processing on the way: converts between floats and scaled fp8,
// moves keys to other positions, and computes the checksum of each block.
//
//   for p in pieces: for plane: for head: for token:
//     x = float(src row)                      (* scale[plane, head], if src is fp8 and dst is not)
//     if plane holds keys: x[rotary] = rotate(x[rotary], cos_sin[p])
//     dst row = round(x)                      (x / scale[plane, head], if dst is fp8, src is not)
//     sums[dst index of p] += checksum of dst row
//
// A row is one vector of `dim` elements. Rows that are neither converted nor rotated are copied as
// they are. Layer: kv. Python: mooncake_kernels/kv/copy_plan.py.
#pragma once

#include <cstdint>

#include "common/checksum.h"
#include "common/element.h"
#include "common/rotation.h"
#include "kv/copy_blocks.h"

namespace mk::kv {

struct TransformBlocksParams {
  CopyBlocksParams copy;  // its runs are rows of src; axes are head and token. dst null: only sums
  int64_t first_plane;    // the index of copy.planes[0] among all planes
  bool keys_alternate;    // planes are k, v, k, v; otherwise all are keys
  int64_t dim;            // elements of a row
  int64_t src_row_bytes;
  int64_t dst_row_bytes;
  ElementType src_type;
  ElementType dst_type;
  const float* scales;  // [planes][heads]; null: none
  Rotation rotation;
  int64_t* sums;            // per block of dst, or of src if there is no dst; null: none
  uint64_t first_word;      // of this cache's rows, among those of several caches
  const int64_t* expected;  // expected and actual checksums of src's blocks; where they differ,
  const int64_t* actual;    // nothing is written; null: not compared

  MK_HD int64_t num_heads() const { return copy.axes[0].extent; }
  MK_HD int64_t num_tokens() const { return copy.axes[1].extent; }
  MK_HD int64_t num_rows() const { return num_heads() * num_tokens(); }  // of a piece in a plane
  MK_HD bool rotates(int64_t plane) const {
    return rotation.cos_sin && !(keys_alternate && (first_plane + plane) % 2);
  }
  MK_HD bool quantizes() const { return scales && dst_row_bytes < src_row_bytes; }
  MK_HD bool dequantizes() const { return scales && dst_row_bytes > src_row_bytes; }
  // Whether rows of that plane are copied as they are.
  MK_HD bool is_plain(int64_t plane) const { return src_type == dst_type && !rotates(plane); }
  MK_HD float scale(int64_t plane, int64_t head) const {
    return scales ? scales[(first_plane + plane) * num_heads() + head] : 1.0f;
  }
  MK_HD const Side& summed_side() const { return sums_src() ? copy.src : copy.dst; }
  MK_HD bool sums_src() const { return !copy.planes[0].dst; }
  MK_HD int64_t summed_row_bytes() const { return sums_src() ? src_row_bytes : dst_row_bytes; }

  // The position of a row's first word in the sum of its block.
  MK_HD uint64_t word_index(int64_t piece, int64_t plane, int64_t head, int64_t token) const {
    const int64_t pieces = summed_side().pieces_per_id;
    const int64_t in_block = piece % pieces * num_tokens() + token;
    const int64_t row = ((first_plane + plane) * num_heads() + head) * num_tokens() * pieces;
    return first_word + static_cast<uint64_t>((row + in_block) * words_of(summed_row_bytes()));
  }

  // Whether src's checksum is as expected, for a piece with good ids.
  MK_HD bool is_as_expected(int64_t piece) const {
    const int64_t i = copy.src.index(piece);
    return !expected || expected[i] == actual[i];
  }
};

// Of num_pieces * num_planes, pieces outermost, processes [begin, end), on the calling thread;
// other threads may add to the same sums. Ids must be good, and checksums as expected.
void transform_blocks_host(const TransformBlocksParams& params, int64_t begin, int64_t end);

// Queues everything on `stream`, as launch_copy_blocks. A piece with an unexpected checksum is
// reported as side kBadChecksum.
constexpr int64_t kBadChecksum = 3;
void launch_transform_blocks(const TransformBlocksParams& params, BadId* bad, int max_sms,
                             void* stream);

}  // namespace mk::kv
