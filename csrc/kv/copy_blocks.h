// copy_blocks: blocks of one paged KV cache into blocks of another, whatever the two layouts.
//
//   for i in pairs: for plane: for a in axes[0]: for b in axes[1]:
//     memcpy(dst + dst_block[i] * dst_block_stride + a * .. + b * .., src + ..., run_bytes)
//
// A plane is one (layer, k or v): its two base addresses are independent, all else is affine. A
// run is the longest range that is contiguous on both sides. Layer: kv. Python:
// mooncake_kernels/kv.py.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk::kv {

constexpr int kMaxAxes = 2;      // head and token, where they could not be merged into the run
constexpr int kMaxPlanes = 512;  // in one launch: 8 KiB of kernel parameters
constexpr int64_t kHole = -1;    // a pair with this id on either side is skipped

struct Axis {
  int64_t extent;
  int64_t src_stride;  // bytes
  int64_t dst_stride;
};

struct Plane {
  const char* src;
  char* dst;
};

// Block ids of one side, [num_pairs]. Without ids, pair i is block i.
struct BlockIds {
  const void* ids;
  bool is_64_bit;
  int64_t num_blocks;  // an id is in [0, num_blocks), or kHole

  MK_HD int64_t operator[](int64_t i) const {
    if (!ids) return i;
    return is_64_bit ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
  }
  MK_HD bool is_valid(int64_t id) const { return 0 <= id && id < num_blocks; }
};

// What a kernel writes when it meets a bad id: the first one to come wins.
constexpr int64_t kBadIdClaimed = -1;
struct BadId {
  int64_t side;   // 0: none, 1: src, 2: dst; kBadIdClaimed: the rest is being written
  int64_t index;  // of the pair
  int64_t id;
};

// A contiguous range to copy; src is null where there is nothing to do.
struct Run {
  const char* src;
  char* dst;
};

struct CopyBlocksParams {
  BlockIds src_blocks;
  BlockIds dst_blocks;
  int64_t num_pairs;
  int64_t src_block_stride;  // bytes
  int64_t dst_block_stride;
  int64_t run_bytes;
  Axis axes[kMaxAxes];  // an unused axis has extent 1
  int32_t num_planes;
  Plane planes[kMaxPlanes];

  MK_HD int64_t runs_per_plane() const { return axes[0].extent * axes[1].extent; }
  MK_HD int64_t num_runs() const { return num_pairs * num_planes * runs_per_plane(); }

  MK_HD bool is_hole(int64_t pair) const {
    return src_blocks[pair] == kHole || dst_blocks[pair] == kHole;
  }

  // The bad id of a pair; side 0 if both are good.
  MK_HD BadId check(int64_t pair) const {
    const int64_t src = src_blocks[pair], dst = dst_blocks[pair];
    if (src != kHole && !src_blocks.is_valid(src)) return {1, pair, src};
    if (dst != kHole && !dst_blocks.is_valid(dst)) return {2, pair, dst};
    return {0, 0, 0};
  }

  // Run r of a pair and plane, 0 <= r < runs_per_plane(). The pair's ids must be good.
  MK_HD Run run(int64_t pair, int32_t plane, int64_t r) const {
    const int64_t a = r / axes[1].extent, b = r % axes[1].extent;
    return {planes[plane].src + src_blocks[pair] * src_block_stride + a * axes[0].src_stride +
                b * axes[1].src_stride,
            planes[plane].dst + dst_blocks[pair] * dst_block_stride + a * axes[0].dst_stride +
                b * axes[1].dst_stride};
  }

  // Run number `index` of them all, 0 <= index < num_runs(), pairs outermost. A hole gives a null
  // src, and so does a bad id, which is also put into `bad`.
  MK_HD Run run(int64_t index, BadId& bad) const {
    const int64_t r = index % runs_per_plane(), rest = index / runs_per_plane();
    const auto plane = static_cast<int32_t>(rest % num_planes);
    const int64_t pair = rest / num_planes;
    bad = check(pair);
    if (bad.side != 0 || is_hole(pair)) return {nullptr, nullptr};
    return run(pair, plane, r);
  }

  // The largest power of two, at most 16, that divides every address and size of the copy.
  MK_HD int alignment() const {
    uint64_t bits = 16 | static_cast<uint64_t>(src_block_stride | dst_block_stride | run_bytes);
    for (const Axis& axis : axes) bits |= static_cast<uint64_t>(axis.src_stride | axis.dst_stride);
    for (int i = 0; i < num_planes; ++i) {
      bits |= reinterpret_cast<uintptr_t>(planes[i].src);
      bits |= reinterpret_cast<uintptr_t>(planes[i].dst);
    }
    return static_cast<int>(bits & -bits);
  }
};

// Pairs [begin, end) on the calling thread. Their ids must be good: see check().
void copy_blocks_host(const CopyBlocksParams& params, int64_t begin, int64_t end);

// The whole copy, queued on `stream` (a cudaStream_t) of the current device, on at most `max_sms`
// multiprocessors (0: all). Pairs with a bad id are skipped; the first of them is written to
// `*bad`, which must be zeroed, reachable by the device, and alive until the copy has run; or null.
// Throws CudaError.
void launch_copy_blocks(const CopyBlocksParams& params, BadId* bad, int max_sms, void* stream);

}  // namespace mk::kv
