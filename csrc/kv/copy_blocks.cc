#include "kv/copy_blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "common/run_copier.h"

namespace mk::kv {
namespace {

constexpr int64_t kTilePieces = 1024;  // located once for all planes

// A piece's location in every plane.
struct Place {
  int64_t piece;
  int64_t src_offset;
  int64_t dst_offset;
};

// False: it is a hole.
bool find(const CopyBlocksParams& params, int64_t piece, Place& place) {
  const int64_t src_id = params.src.id(piece), dst_id = params.dst.id(piece);
  if (src_id == kHole || dst_id == kHole) return false;
  place = {piece, params.src.offset(piece, src_id), params.dst.offset(piece, dst_id)};
  return true;
}

void add_runs(const CopyBlocksParams& params, const Plane& plane, const Place& place,
              RunCopier& copier) {
  for (int64_t a = 0; a < params.axes[0].extent; ++a) {
    for (int64_t b = 0; b < params.axes[1].extent; ++b) {
      copier.add(params.run(plane, place.src_offset, place.dst_offset, a, b));
    }
  }
}

// Whether, on that side, the planes of a block lie within it.
template <class Address>
bool are_within_blocks(const CopyBlocksParams& params, const Side& side, Address Plane::* base) {
  if (params.num_planes < 2) return false;
  const auto first = reinterpret_cast<intptr_t>(params.planes[0].*base);
  const auto second = reinterpret_cast<intptr_t>(params.planes[1].*base);
  return std::abs(second - first) < side.block_stride;
}

// Copies with pieces outermost.
void copy_by_piece(const CopyBlocksParams& params, int64_t begin, int64_t end, RunCopier& copier) {
  while (begin < end) {
    const int64_t piece = begin / params.num_planes, first = piece * params.num_planes;
    const int64_t piece_end = std::min(end, first + params.num_planes);
    Place place;
    if (find(params, piece, place)) {
      for (int64_t i = begin; i < piece_end; ++i) {
        add_runs(params, params.planes[i - first], place, copier);
      }
    }
    begin = piece_end;
  }
}

// Copies with planes outermost, within a tile of pieces at a time.
void copy_by_plane(const CopyBlocksParams& params, int64_t begin, int64_t end, RunCopier& copier) {
  const int64_t num_pieces = params.num_pieces;
  Place places[kTilePieces];
  for (int64_t tile = 0; tile < num_pieces; tile += kTilePieces) {
    const int64_t tile_end = std::min(tile + kTilePieces, num_pieces);
    int64_t num_places = 0;
    for (int64_t piece = tile; piece < tile_end; ++piece) {
      num_places += find(params, piece, places[num_places]);
    }
    if (num_places == 0) continue;
    for (int64_t plane = begin / num_pieces; plane * num_pieces < end; ++plane) {
      const int64_t first = std::max(tile, begin - plane * num_pieces);
      const int64_t last = std::min(tile_end, end - plane * num_pieces);
      for (const Place* place = places; place < places + num_places; ++place) {
        if (place->piece < first || place->piece >= last) continue;
        add_runs(params, params.planes[plane], *place, copier);
      }
    }
  }
}

}  // namespace

// Copies adjacent memory together: block by block if a block contains its planes; plane by plane if
// each plane is a separate pool, as its rows share pages, whose translations are then cached.
void copy_blocks_host(const CopyBlocksParams& params, int64_t begin, int64_t end) {
  RunCopier copier(params.num_runs() * params.run_bytes, params.run_bytes);
  const bool by_piece = are_within_blocks(params, params.src, &Plane::src) ||
                        are_within_blocks(params, params.dst, &Plane::dst);
  (by_piece ? copy_by_piece : copy_by_plane)(params, begin, end, copier);
  copier.finish();
}

}  // namespace mk::kv
