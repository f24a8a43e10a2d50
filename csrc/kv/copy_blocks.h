// copy_blocks: copies blocks of one paged KV cache to blocks of another, for any two layouts.
//
//   for p in pieces: for plane: for a in axes[0]: for b in axes[1]:
//     memcpy(plane.dst + dst.offset(p) + a * .. + b * ..,
//            plane.src + src.offset(p) + ..., run_bytes)
//
// A piece is as many tokens as divide both block sizes, so it lies in one block on either side;
// with equal sizes it is a block. A plane is one (layer, k or v): its two base addresses are
// independent; everything else is affine. A run is the longest range that is contiguous on both
// sides.
// Layer: kv. Python: mooncake_kernels/kv/copy_plan.py.
#pragma once

#include <cstdint>

#include "common/hd.h"
#include "common/run_copier.h"

namespace mk::kv {

constexpr int kMaxAxes = 2;      // head and token, if not merged into the run
constexpr int kMaxPlanes = 512;  // per launch: 8 KiB of kernel parameters
constexpr int64_t kHole = -1;    // a piece with this id on either side is skipped

struct Axis {
  int64_t extent;
  int64_t src_stride;  // bytes
  int64_t dst_stride;
};

struct Plane {
  const char* src;
  char* dst;
};

// The location of one side of piece p: its id names a block, or a slot of a block.
struct Side {
  const void* ids;  // null: id i is i
  bool is_64_bit;
  int64_t num_ids;        // an id is in [0, num_ids), or kHole
  int64_t block_stride;   // bytes, as all strides
  int64_t pieces_per_id;  // more than 1: a block of this side spans several of the other's
  int64_t piece_stride;
  int64_t slots_per_block;  // more than 1: an id is a slot, block * slots_per_block + offset
  int64_t slot_stride;

  MK_HD int64_t index(int64_t piece) const { return piece / pieces_per_id; }
  MK_HD int64_t id(int64_t piece) const {
    const int64_t i = index(piece);
    if (!ids) return i;
    return is_64_bit ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
  }
  MK_HD bool is_valid(int64_t id) const { return 0 <= id && id < num_ids; }

  MK_HD int64_t offset(int64_t piece, int64_t id) const {
    return id / slots_per_block * block_stride + id % slots_per_block * slot_stride +
           piece % pieces_per_id * piece_stride;
  }
  MK_HD int64_t stride_bits() const { return block_stride | piece_stride | slot_stride; }
};

// What a kernel writes when it meets a bad id: the first one wins.
constexpr int64_t kBadIdClaimed = -1;
struct BadId {
  int64_t side;   // 0: none, 1: src, 2: dst; kBadIdClaimed: the rest is being written
  int64_t index;  // of the id
  int64_t id;
};

struct CopyBlocksParams {
  Side src;
  Side dst;
  int64_t num_pieces;
  int64_t run_bytes;
  Axis axes[kMaxAxes];  // an unused axis has extent 1
  int32_t num_planes;
  Plane planes[kMaxPlanes];

  MK_HD int64_t runs_per_plane() const { return axes[0].extent * axes[1].extent; }
  MK_HD int64_t num_runs() const { return num_pieces * num_planes * runs_per_plane(); }

  // The bad id of a piece; side 0 if both are good.
  MK_HD BadId check(int64_t piece) const {
    const int64_t src_id = src.id(piece), dst_id = dst.id(piece);
    if (src_id != kHole && !src.is_valid(src_id)) return {1, src.index(piece), src_id};
    if (dst_id != kHole && !dst.is_valid(dst_id)) return {2, dst.index(piece), dst_id};
    return {0, 0, 0};
  }

  // Run (a, b) along the axes, in a plane, of the piece with those offsets.
  MK_HD Run run(const Plane& plane, int64_t src_offset, int64_t dst_offset, int64_t a,
                int64_t b) const {
    return {plane.src + src_offset + a * axes[0].src_stride + b * axes[1].src_stride,
            plane.dst + dst_offset + a * axes[0].dst_stride + b * axes[1].dst_stride};
  }

  // Run number `index` of all, 0 <= index < num_runs(), pieces outermost. A hole gives a null src,
  // and so does a bad id, which is also stored in `bad`.
  MK_HD Run run(int64_t index, BadId& bad) const {
    const int64_t r = index % runs_per_plane(), rest = index / runs_per_plane();
    const auto plane = static_cast<int32_t>(rest % num_planes);
    const int64_t piece = rest / num_planes;
    bad = check(piece);
    const int64_t src_id = src.id(piece), dst_id = dst.id(piece);
    if (bad.side != 0 || src_id == kHole || dst_id == kHole) return {nullptr, nullptr};
    return run(planes[plane], src.offset(piece, src_id), dst.offset(piece, dst_id),
               r / axes[1].extent, r % axes[1].extent);
  }

  // Every address and stride of a side, or-ed: a power of two divides this if and only if it
  // divides each.
  MK_HD uint64_t src_bits() const {
    auto bits = static_cast<uint64_t>(src.stride_bits());
    for (const Axis& axis : axes) bits |= static_cast<uint64_t>(axis.src_stride);
    for (int i = 0; i < num_planes; ++i) bits |= reinterpret_cast<uintptr_t>(planes[i].src);
    return bits;
  }
  MK_HD uint64_t dst_bits() const {
    auto bits = static_cast<uint64_t>(dst.stride_bits());
    for (const Axis& axis : axes) bits |= static_cast<uint64_t>(axis.dst_stride);
    for (int i = 0; i < num_planes; ++i) bits |= reinterpret_cast<uintptr_t>(planes[i].dst);
    return bits;
  }
  // The largest power of two, at most 16, that divides every address and size of the copy.
  MK_HD int alignment() const {
    const uint64_t bits = 16 | src_bits() | dst_bits() | static_cast<uint64_t>(run_bytes);
    return static_cast<int>(bits & -bits);
  }
};

// Copies part [begin, end) of num_pieces * num_planes, on the calling thread. Disjoint parts copy
// different runs, and parts that cover the whole range copy all. Ids must be good: see check().
void copy_blocks_host(const CopyBlocksParams& params, int64_t begin, int64_t end);

// Queues the whole copy on `stream` (a cudaStream_t) of the current device, on at most `max_sms`
// multiprocessors (0: all). Pieces with a bad id are skipped; the first bad id is written to
// `*bad`, which must be zeroed, reachable by the device, and alive until the copy has run; it may
// be null. Throws CudaError.
void launch_copy_blocks(const CopyBlocksParams& params, BadId* bad, int max_sms, void* stream);

}  // namespace mk::kv
