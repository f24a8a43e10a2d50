#include "kv/copy_blocks.h"

#include "kv/copy_run.h"

namespace mk::kv {

void copy_blocks_host(const CopyBlocksParams& params, int64_t begin, int64_t end) {
  const CopyRun copy_run = choose_copy_run(params.num_runs() * params.run_bytes, params.run_bytes);
  const int64_t runs_per_plane = params.runs_per_plane();
  Run pending{nullptr, nullptr};  // copied once it is known which run comes after it
  for (int64_t pair = begin; pair < end; ++pair) {
    if (params.is_hole(pair)) continue;
    for (int32_t plane = 0; plane < params.num_planes; ++plane) {
      for (int64_t r = 0; r < runs_per_plane; ++r) {
        const Run run = params.run(pair, plane, r);
        if (pending.src) copy_run(pending.dst, pending.src, params.run_bytes, run.src);
        pending = run;
      }
    }
  }
  if (pending.src) copy_run(pending.dst, pending.src, params.run_bytes, nullptr);
}

}  // namespace mk::kv
