// BlockPool: blocks of one size at base + id * stride, in one or several planes (a layer's K, its
// V).
//
//   Request request = paged_request(Direction::kWrite, local, src_ids, remote, dst_ids);
//
// Layer: transfer. Python face: mooncake_kernels/transfer/pools.py, which has checked that a pool
// ends below 2^64 and that no two of its blocks overlap.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/request/integers.h"
#include "transfer/request/request.h"

namespace mk::transfer {

struct BlockPool {
  std::vector<uint64_t> planes;  // where block 0 is, in each
  uint64_t num_blocks;
  uint64_t block_bytes;
  uint64_t stride_bytes;
};

// Moves block local_ids[i] from or to block remote_ids[i], in each plane: plane by plane, so that
// consecutive blocks are merged. Throws InvalidArgument: the pools do not match, an id is not in
// its pool, or two blocks have the same target.
Request paged_request(Direction direction, const BlockPool& local, const Integers& local_ids,
                      const BlockPool& remote, const Integers& remote_ids);

}  // namespace mk::transfer
