#include "kv/list_runs.h"

#include <cstddef>

namespace mk::kv {
namespace {

struct Offsets {
  int64_t src;
  int64_t dst;
};

// Of each piece without a hole: the same in all planes.
std::vector<Offsets> offsets_of(const CopyBlocksParams& p) {
  std::vector<Offsets> offsets;
  offsets.reserve(p.num_pieces);
  for (int64_t piece = 0; piece < p.num_pieces; ++piece) {
    const int64_t src_id = p.src.id(piece), dst_id = p.dst.id(piece);
    if (src_id == kHole || dst_id == kHole) continue;
    offsets.push_back({p.src.offset(piece, src_id), p.dst.offset(piece, dst_id)});
  }
  return offsets;
}

}  // namespace

void list_runs(const CopyBlocksParams& p, std::vector<CopyRange>& ranges) {
  if (p.run_bytes == 0) return;
  const std::vector<Offsets> offsets = offsets_of(p);
  for (int32_t plane = 0; plane < p.num_planes; ++plane) {
    const size_t first = ranges.size();
    for (const Offsets& o : offsets) {
      for (int64_t a = 0; a < p.axes[0].extent; ++a) {
        for (int64_t b = 0; b < p.axes[1].extent; ++b) {
          const Run run = p.run(p.planes[plane], o.src, o.dst, a, b);
          const CopyRange range{run.src, run.dst, p.run_bytes};
          if (ranges.size() == first || !join(ranges.back(), range)) ranges.push_back(range);
        }
      }
    }
  }
}

}  // namespace mk::kv
