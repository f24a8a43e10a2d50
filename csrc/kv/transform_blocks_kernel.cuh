// The device code of transform_blocks: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "kv/copy_blocks_kernel.cuh"
#include "kv/transform_row.cuh"

namespace mk::kv {

constexpr int kWarpThreads = 32;
constexpr int kMaxTransformThreads = 512;  // more would leave too few registers per thread
constexpr unsigned kTileRows = 128;        // one addition to a block's sum per that many

// A warp takes a tile: some rows of a piece in a plane. `lanes` of its threads share a row.
struct TransformTiling {
  bool by_unit;  // otherwise a thread takes a row, element by element: correct, but slow
  int32_t lanes;
  int64_t tiles_per_plane;
  int64_t num_tiles;
};

// Why a piece must not be processed; side 0 if it may. Does not check for holes.
__device__ inline BadId check(const TransformBlocksParams& p, int64_t piece) {
  const BadId found = p.copy.check(piece);
  if (found.side != 0 || p.is_as_expected(piece)) return found;
  return {kBadChecksum, p.copy.src.index(piece), p.copy.src.id(piece)};
}

// The calling thread's share of a tile; returns its share of the sum.
template <class Row>
__device__ inline uint64_t transform_tile(const TransformBlocksParams& p,
                                          const TransformTiling& tiling, int64_t piece,
                                          int64_t plane, int64_t first, int lane) {
  const int64_t src_offset = p.copy.src.offset(piece, p.copy.src.id(piece));
  const int64_t dst_offset = p.copy.dst.offset(piece, p.copy.dst.id(piece));
  const float* cos_sin = p.rotates(plane) ? p.rotation.of(piece) : nullptr;
  const bool plain = p.is_plain(plane);
  const auto num_rows = static_cast<unsigned>(p.num_rows());
  const auto num_tokens = static_cast<unsigned>(p.num_tokens());
  const unsigned last = static_cast<unsigned>(first) + kTileRows;
  const unsigned end = last < num_rows ? last : num_rows;
  uint64_t sum = 0;
  for (unsigned r = first + lane / tiling.lanes; r < end; r += kWarpThreads / tiling.lanes) {
    const unsigned head = r / num_tokens, token = r % num_tokens;
    const Row row{{p, p.copy.run(p.copy.planes[plane], src_offset, dst_offset, head, token),
                   p.scale(plane, head), cos_sin, p.word_index(piece, plane, head, token)}};
    sum += row.transform(plain, lane % tiling.lanes, tiling.lanes);
  }
  return sum;
}

template <class Row>
__global__ void __launch_bounds__(kMaxTransformThreads)
    transform_blocks_kernel(const __grid_constant__ TransformBlocksParams p,
                            const TransformTiling tiling, BadId* bad) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;

  for (int64_t tile = thread / kWarpThreads; tile < tiling.num_tiles; tile += num_warps) {
    const int64_t index = tile / tiling.tiles_per_plane;
    const int64_t plane = index % p.copy.num_planes, piece = index / p.copy.num_planes;
    if (p.copy.src.id(piece) == kHole || p.copy.dst.id(piece) == kHole) continue;
    const BadId found = check(p, piece);
    if (found.side != 0) {
      if (lane == 0) report(bad, found);
      continue;
    }
    const int64_t first = tile % tiling.tiles_per_plane * kTileRows;
    unsigned long long sum = transform_tile<Row>(p, tiling, piece, plane, first, lane);
    if (!p.sums) continue;
    for (int step = kWarpThreads / 2; step > 0; step /= 2) {
      sum += __shfl_down_sync(0xffffffffu, sum, step);
    }
    auto* const sums = reinterpret_cast<unsigned long long*>(p.sums);
    if (lane == 0) atomicAdd(sums + p.summed_side().index(piece), sum);
  }
}

// Whether every row consists of whole, aligned units.
inline bool fits_units(const TransformBlocksParams& p) {
  const auto src_bits = p.copy.src_bits() | static_cast<uint64_t>(p.src_row_bytes);
  const auto dst_bits = p.copy.dst_bits() | static_cast<uint64_t>(p.dst_row_bytes);
  const bool converts = p.src_type != p.dst_type || p.rotation.cos_sin;
  const bool some_plain = p.src_type == p.dst_type;
  const auto bytes = [some_plain](ElementType type) {
    return some_plain || words_of_unit(type) > 1 ? 2 * kWordBytes : kWordBytes;
  };
  const Rotation& r = p.rotation;
  const int64_t elements = !converts    ? 0
                           : !r.cos_sin ? p.dim
                                        : p.dim | r.first | r.num_pairs << (r.interleaved ? 1 : 0);
  return src_bits % bytes(p.src_type) == 0 && dst_bits % bytes(p.dst_type) == 0 &&
         elements % kUnit == 0;
}

inline TransformTiling tile_rows(const TransformBlocksParams& p) {
  TransformTiling tiling{};
  tiling.by_unit = fits_units(p);
  tiling.lanes = 1;
  const int64_t units = tiling.by_unit ? words_of(p.src_row_bytes) / words_of_unit(p.src_type) : 1;
  while (tiling.lanes < kWarpThreads && tiling.lanes < units) tiling.lanes *= 2;
  tiling.tiles_per_plane = (p.num_rows() + kTileRows - 1) / kTileRows;
  tiling.num_tiles = tiling.tiles_per_plane * p.copy.num_pieces * p.copy.num_planes;
  return tiling;
}

// Calls launch(kernel, tiling) with the kernel for `p`, whose types are equal, or one of them fp8.
template <class Launch>
void with_transform_kernel(const TransformBlocksParams& p, const Launch& launch) {
  constexpr ElementType kBytes = ElementType::kBytes;
  const TransformTiling tiling = tile_rows(p);
  if (!tiling.by_unit) return launch(transform_blocks_kernel<RowOfElements>, tiling);
  if (p.src_type == kBytes) {
    return launch(transform_blocks_kernel<RowOfUnits<kBytes, kBytes>>, tiling);
  }
  with_element(p.src_type, [&](auto src) {
    with_element(p.dst_type, [&](auto dst) {
      constexpr ElementType kSrc = decltype(src)::kType, kDst = decltype(dst)::kType;
      constexpr bool kSrcIsFp8 = words_of_unit(kSrc) == 1, kDstIsFp8 = words_of_unit(kDst) == 1;
      if constexpr (kSrc == kDst || kSrcIsFp8 != kDstIsFp8) {
        launch(transform_blocks_kernel<RowOfUnits<kSrc, kDst>>, tiling);
      }
    });
  });
}

}  // namespace mk::kv
