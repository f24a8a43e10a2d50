#include "transfer/request/prepare.h"

#include <algorithm>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/request/coalesce.h"
#include "transfer/request/overlap.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {
namespace {

void check_distinct(const char* op, const Request& request) {
  const Ranges targets = request.ranges(request.targets());
  if (const auto pair = find_overlap(targets)) {
    throw InvalidArgument(
        concat(op, ": descriptors[", pair->first, "] and descriptors[", pair->second,
               "] must not overlap in ", request.writes() ? "remote" : "local", " memory, got ",
               describe(targets[pair->first]), " and ", describe(targets[pair->second])));
  }
}

std::vector<RegionRef> local_regions(const RegionTable& own_regions, const Request& request) {
  const Rights needed = request.writes() ? 0 : kLocalWrite;
  const bool in_pools = !request.local.empty() && !request.local_pools.empty();
  try {
    if (in_pools) return own_regions.check(Ranges::rows(request.local_pools), needed, "local", 0);
  } catch (const Refused&) {
    // One is in several regions, or some of it in none.
  }
  return own_regions.check(request.ranges(request.local), needed, "local", 0);
}

// Most callers have blocks of one size, even if they pass a size for each.
void unify_sizes(Request& request) {
  const std::vector<uint64_t>& sizes = request.sizes;
  const auto differs = [&](uint64_t size) { return size != sizes[0]; };
  if (!sizes.empty() && std::none_of(sizes.begin(), sizes.end(), differs)) request.sizes.resize(1);
}

}  // namespace

void prepare(const RegionTable& own_regions, Request& request) {
  const char* const op = request.op;
  MK_CHECK(!request.local.empty() || request.notify, op,
           ": descriptors must not be empty unless notify is given");
  for (size_t i = 0; i < request.sizes.size() && !request.local.empty(); ++i) {
    MK_CHECK(request.sizes[i] > 0, op, ": descriptors[", i, "] num_bytes must be positive, got 0");
  }
  MK_CHECK(!request.notify || request.notify->size() <= kMaxNotificationBytes, op,
           ": notify must be at most ", kMaxNotificationBytes, " bytes, got ",
           request.notify->size());
  try {
    request.regions = local_regions(own_regions, request);
  } catch (const Refused& refused) {
    throw InvalidArgument(concat(op, ": ", refused.what()));
  }
  unify_sizes(request);
  if (!request.is_distinct) check_distinct(op, request);
  coalesce(request);
}

}  // namespace mk::transfer
