#include "kv/copy_batch.h"

#include <algorithm>
#include <optional>

#include "common/math.h"
#include "common/run_copier.h"

namespace mk::kv {

void fill_params(CopyBatchParams& params, const CopyRange* ranges, int64_t num_ranges) {
  params.num_ranges = num_ranges;
  params.num_tiles = 0;
  for (int64_t i = 0; i < num_ranges; ++i) {
    params.src[i] = ranges[i].src;
    params.dst[i] = ranges[i].dst;
    params.num_bytes[i] = ranges[i].num_bytes;
    params.first_tile[i] = params.num_tiles;
    params.num_tiles += ceil_div(ranges[i].num_bytes, kTileBytes);
  }
}

void copy_batch_host(const CopyRange* ranges, const int64_t* ends, int64_t num_ranges,
                     int64_t begin, int64_t end) {
  const int64_t total_bytes = num_ranges ? ends[num_ranges - 1] : 0;
  int64_t i = std::upper_bound(ends, ends + num_ranges, begin) - ends;
  // A RunCopier takes runs of one length: keeping it for as many ranges as possible is faster.
  std::optional<RunCopier> copier;
  int64_t run_bytes = 0;
  for (; begin < end; ++i) {
    const CopyRange& range = ranges[i];
    const int64_t offset = begin - (ends[i] - range.num_bytes);
    const int64_t num_bytes = std::min(ends[i], end) - begin;
    if (num_bytes != run_bytes) {
      if (copier) copier->finish();
      copier.emplace(total_bytes, run_bytes = num_bytes);
    }
    copier->add({range.src + offset, range.dst + offset});
    begin += num_bytes;
  }
  if (copier) copier->finish();
}

}  // namespace mk::kv
