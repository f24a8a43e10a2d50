#include "transfer/rdma/slicer.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace mk::transfer {
namespace {

// A tail of at most 1/kTailPart of a slice joins the slice before it.
constexpr uint64_t kTailPart = 4;

// Slices being filled, one per pair of regions.
class Filler {
 public:
  Filler(bool reads, uint64_t slice_bytes, Slices& slices, Slices& spare)
      : reads_(reads), slice_bytes_(slice_bytes), slices_(slices), spare_(spare) {}

  void add(const Region& local, const RemoteRegion& remote, rdma::Segment segment) {
    Open& open = open_[{&local, &remote}];
    while (segment.num_bytes > 0) {
      if (open.slice.empty()) {
        append(open.slice, spare_).local = local.on_nics;
        open.slice.back().reads = reads_;
      }
      Slice& slice = open.slice.back();
      const uint64_t step = std::min(segment.num_bytes, slice_bytes_ - slice.num_bytes);
      slice.segments.push_back({segment.local, segment.remote, step});
      slice.num_bytes += step;
      segment = {segment.local + step, segment.remote + step, segment.num_bytes - step};
      if (slice.num_bytes == slice_bytes_) close(open);
    }
  }

  void finish() {
    for (auto& [regions, open] : open_) {
      if (open.slice.empty()) continue;
      const Slice& tail = open.slice.back();
      if (open.last && tail.num_bytes <= slice_bytes_ / kTailPart) {
        join(tail, *open.last);
        give_back(open.slice, spare_);
      } else {
        close(open);
      }
    }
  }

 private:
  struct Open {
    Slices slice;           // none, or one
    Slice* last = nullptr;  // the previous one
  };

  void close(Open& open) {
    open.last = &open.slice.back();
    slices_.splice(slices_.end(), open.slice);
  }

  static void join(const Slice& tail, Slice& slice) {
    auto first = tail.segments.begin();
    rdma::Segment& last = slice.segments.back();
    if (first->local == last.local + last.num_bytes &&
        first->remote == last.remote + last.num_bytes) {  // one range, cut in two
      last.num_bytes += first->num_bytes;
      ++first;
    }
    slice.segments.insert(slice.segments.end(), first, tail.segments.end());
    slice.num_bytes += tail.num_bytes;
  }

  const bool reads_;
  const uint64_t slice_bytes_;
  Slices& slices_;
  Slices& spare_;
  std::map<std::pair<const Region*, const RemoteRegion*>, Open> open_;
};

}  // namespace

void RemoteKeys::add(std::vector<RemoteRegion> regions) {
  const auto is_gone = [&](const RemoteRegion& known) {
    return std::any_of(regions.begin(), regions.end(), [&](const RemoteRegion& told) {
      return told.range.address < known.range.address + known.range.num_bytes &&
             known.range.address < told.range.address + told.range.num_bytes;
    });
  };
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), is_gone), regions_.end());
  std::move(regions.begin(), regions.end(), std::back_inserter(regions_));
  std::sort(regions_.begin(), regions_.end(), [](const RemoteRegion& a, const RemoteRegion& b) {
    return a.range.address < b.range.address;
  });
}

const RemoteRegion* RemoteKeys::find(const Range& range) const {
  const auto found =
      find_region(regions_, range, [](const RemoteRegion& region) { return region.range; });
  return found == regions_.end() ? nullptr : &*found;
}

const RemoteRegion* RemoteKeys::find(const Slice& slice) const {
  const RemoteRegion* region = nullptr;
  for (const rdma::Segment& segment : slice.segments) {
    const Range range{segment.remote, segment.num_bytes};
    if (!region) region = find(range);
    if (!region || !region->range.contains(range)) return nullptr;
  }
  return region;
}

bool cut(const Request& request, const Piece& piece, const RemoteKeys& keys, uint64_t slice_bytes,
         Slices& slices, Slices& spare) {
  std::vector<RegionRef> regions = request.regions;
  const auto range_of = [](const RegionRef& region) { return region->range; };
  std::sort(regions.begin(), regions.end(), [&](const RegionRef& a, const RegionRef& b) {
    return range_of(a).address < range_of(b).address;
  });
  const Rights needed = request.writes() ? kRemoteWrite : kRemoteRead;
  Filler filler(!request.writes(), slice_bytes, slices, spare);
  const Region* local = nullptr;  // of the previous range: usually the same
  const RemoteRegion* remote = nullptr;
  bool all = true;
  for_each_range(request, piece, [&](uint64_t here, uint64_t there, uint64_t num_bytes) {
    if (!all) return;
    if (!local || !local->range.contains({here, num_bytes})) {
      const auto found = find_region(regions, {here, num_bytes}, range_of);
      local = found == regions.end() ? nullptr : found->get();
    }
    if (!remote || !remote->range.contains({there, num_bytes})) {
      remote = keys.find(Range{there, num_bytes});
    }
    all = local && local->on_nics && remote && !(needed & ~remote->rights);
    if (all) filler.add(*local, *remote, {here, there, num_bytes});
  });
  if (all) filler.finish();
  return all;
}

}  // namespace mk::transfer
