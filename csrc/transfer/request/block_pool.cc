#include "transfer/request/block_pool.h"

#include "common/check.h"
#include "transfer/request/overlap.h"

namespace mk::transfer {
namespace {

std::vector<uint64_t> checked_ids(const char* op, const char* side, const BlockPool& pool,
                                  const Integers& values) {
  std::vector<uint64_t> ids = copy_of(values);
  bool bad = false;
  for (const uint64_t id : ids) bad |= id >= pool.num_blocks;
  for (size_t i = 0; bad && i < ids.size(); ++i) {
    MK_CHECK(ids[i] < pool.num_blocks, op, ": ", side, " ids[", i, "] must be from 0 to ",
             pool.num_blocks - 1, ", got ", values.text(ids[i]));
  }
  return ids;
}

void check_distinct(const char* op, const char* side, const std::vector<uint64_t>& ids) {
  constexpr uint64_t kOne = 1;
  if (const auto pair = find_overlap({ids.data(), 1, &kOne, 0, ids.size()})) {
    throw InvalidArgument(concat(op, ": ", side, " ids[", pair->first, "] and ids[", pair->second,
                                 "] must differ, for they are written to, got ", ids[pair->first],
                                 " twice"));
  }
}

// Replaces ids by the blocks' addresses, plane by plane.
void expand(const BlockPool& pool, std::vector<uint64_t>& ids) {
  const size_t count = ids.size();
  const uint64_t stride = pool.stride_bytes;
  ids.resize(pool.planes.size() * count);
  for (size_t plane = pool.planes.size(); plane-- > 0;) {  // the first one last: the ids are there
    const uint64_t base = pool.planes[plane];
    uint64_t* const addresses = ids.data() + plane * count;
    for (size_t i = 0; i < count; ++i) addresses[i] = base + ids[i] * stride;
  }
}

}  // namespace

Request paged_request(Direction direction, const BlockPool& local, const Integers& local_ids,
                      const BlockPool& remote, const Integers& remote_ids) {
  const bool writes = direction == Direction::kWrite;
  const char* const op = writes ? "write_blocks" : "read_blocks";
  MK_CHECK(local.planes.size() == remote.planes.size(), op,
           ": the pools must have equally many planes, got ", local.planes.size(), " and ",
           remote.planes.size());
  MK_CHECK(local.block_bytes == remote.block_bytes, op,
           ": the pools must have blocks of one size, got ", local.block_bytes, " and ",
           remote.block_bytes, " bytes");
  MK_CHECK(local_ids.count == remote_ids.count, op, ": the ids must be equally many, got ",
           local_ids.count, " and ", remote_ids.count);
  Request request{};
  request.direction = direction;
  request.local = checked_ids(op, "local", local, local_ids);
  request.remote = checked_ids(op, "remote", remote, remote_ids);
  check_distinct(op, writes ? "remote" : "local", request.targets());
  expand(local, request.local);
  expand(remote, request.remote);
  const uint64_t pool_bytes = (local.num_blocks - 1) * local.stride_bytes + local.block_bytes;
  for (const uint64_t plane : local.planes) request.local_pools.push_back({plane, pool_bytes});
  request.sizes = {local.block_bytes};
  request.num_bytes = local.block_bytes * request.num_ranges();
  request.is_distinct = true;
  return request;
}

}  // namespace mk::transfer
