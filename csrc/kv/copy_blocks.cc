#include "kv/copy_blocks.h"

#include <algorithm>
#include <utility>

#include "common/run_copier.h"

namespace mk::kv {

void copy_blocks_host(const CopyBlocksParams& params, int64_t begin, int64_t end) {
  RunCopier copier(params.num_runs() * params.run_bytes, params.run_bytes);
  int64_t first = begin % params.num_planes;
  for (int64_t piece = begin / params.num_planes; begin < end; ++piece) {
    const int64_t last = std::min<int64_t>(params.num_planes, first + end - begin);
    const int64_t from = std::exchange(first, 0);
    begin += last - from;
    const int64_t src_id = params.src.id(piece), dst_id = params.dst.id(piece);
    if (src_id == kHole || dst_id == kHole) continue;
    const int64_t src_offset = params.src.offset(piece, src_id);
    const int64_t dst_offset = params.dst.offset(piece, dst_id);
    for (int64_t plane = from; plane < last; ++plane) {
      for (int64_t a = 0; a < params.axes[0].extent; ++a) {
        for (int64_t b = 0; b < params.axes[1].extent; ++b) {
          copier.add(params.run(params.planes[plane], src_offset, dst_offset, a, b));
        }
      }
    }
  }
  copier.finish();
}

}  // namespace mk::kv
