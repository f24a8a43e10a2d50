#include "transfer/request/coalesce.h"

#include <utility>

namespace mk::transfer {
namespace {

// The local region that a run lies in: mostly that of the run before.
class RunRegion {
 public:
  explicit RunRegion(const std::vector<RegionRef>& regions) : regions_(regions) {}

  // Whether the region of the range at `address` is also that of the one at `next`.
  bool reaches(uint64_t address, uint64_t next) {
    if (!range_.contains({address, 1})) range_ = find(address);
    return range_.contains({next, 1});
  }

 private:
  Range find(uint64_t address) const {
    for (const RegionRef& region : regions_) {
      if (region->range.contains({address, 1})) return region->range;
    }
    return {};
  }

  const std::vector<RegionRef>& regions_;
  Range range_{};
};

// Whether range i may be appended to the `num_bytes` that start at range `first`.
bool continues(const Request& request, RunRegion& region, size_t first, uint64_t num_bytes,
               size_t i) {
  const uint64_t local = request.local[i], remote = request.remote[i];
  if (local - request.local[first] != num_bytes || remote - request.remote[first] != num_bytes) {
    return false;
  }
  // Within one process (local), a source may be what an earlier descriptor has written: order
  // matters.
  const uint64_t distance = local > remote ? local - remote : remote - local;
  if (distance != 0 && distance < num_bytes + request.size_of(i)) return false;
  return region.reaches(request.local[first], local);
}

// The first range from `i` on that begins where the one before it ends, at both ends. Scattered
// blocks have none: this plain loop is all that coalesce() does for them.
size_t next_adjacent(const Request& request, size_t i) {
  const size_t count = request.num_ranges(), step = request.sizes.size() == 1 ? 0 : 1;
  const uint64_t* const local = request.local.data();
  const uint64_t* const remote = request.remote.data();
  const uint64_t* const sizes = request.sizes.data();
  const auto is_adjacent = [&](const uint64_t* side) {
    return side[i] - side[i - 1] == sizes[(i - 1) * step];
  };
  while (i < count && !(is_adjacent(local) && is_adjacent(remote))) ++i;
  return i;
}

}  // namespace

void coalesce(Request& request) {
  const size_t count = request.num_ranges();
  RunRegion region(request.regions);
  size_t i = next_adjacent(request, 1);
  while (i < count && !continues(request, region, i - 1, request.size_of(i - 1), i)) {
    i = next_adjacent(request, i + 1);
  }
  if (i >= count) return;
  std::vector<uint64_t> sizes(i);
  for (size_t k = 0; k < i; ++k) sizes[k] = request.size_of(k);
  for (; i < count; ++i) {
    const size_t last = sizes.size() - 1;
    if (continues(request, region, last, sizes[last], i)) {
      sizes[last] += request.size_of(i);
    } else {
      request.local[last + 1] = request.local[i];
      request.remote[last + 1] = request.remote[i];
      sizes.push_back(request.size_of(i));
    }
  }
  request.local.resize(sizes.size());
  request.remote.resize(sizes.size());
  request.unmerged_sizes = std::exchange(request.sizes, std::move(sizes));
}

bool split(Request& request) {
  if (request.unmerged_sizes.empty()) return false;
  const std::vector<uint64_t> runs = std::exchange(request.sizes, {});
  const std::vector<uint64_t> local = std::exchange(request.local, {});
  const std::vector<uint64_t> remote = std::exchange(request.remote, {});
  request.sizes = std::exchange(request.unmerged_sizes, {});
  for (size_t run = 0; run < runs.size(); ++run) {
    for (uint64_t offset = 0; offset < runs[run];) {
      request.local.push_back(local[run] + offset);
      request.remote.push_back(remote[run] + offset);
      offset += request.size_of(request.local.size() - 1);
    }
  }
  return true;
}

}  // namespace mk::transfer
