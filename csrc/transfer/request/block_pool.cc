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

std::vector<uint64_t> addresses_of(const BlockPool& pool, const std::vector<uint64_t>& ids) {
  std::vector<uint64_t> addresses;
  addresses.reserve(pool.planes.size() * ids.size());
  for (const uint64_t base : pool.planes) {
    for (const uint64_t id : ids) addresses.push_back(base + id * pool.stride_bytes);
  }
  return addresses;
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
  const auto from = checked_ids(op, "local", local, local_ids);
  const auto to = checked_ids(op, "remote", remote, remote_ids);
  check_distinct(op, writes ? "remote" : "local", writes ? to : from);
  Request request{};
  request.direction = direction;
  request.local = addresses_of(local, from);
  request.remote = addresses_of(remote, to);
  request.sizes = {local.block_bytes};
  request.num_bytes = local.block_bytes * request.num_ranges();
  request.is_distinct = true;
  return request;
}

}  // namespace mk::transfer
