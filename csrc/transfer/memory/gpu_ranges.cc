#include "transfer/memory/gpu_ranges.h"

#include <algorithm>
#include <iterator>

namespace mk::transfer {

GpuRanges::GpuRanges(const std::vector<RegionRef>& regions) {
  for (const RegionRef& region : regions) {
    if (region->device >= 0) regions_.push_back({region->range, region->device});
  }
  std::sort(regions_.begin(), regions_.end(),
            [](const Item& a, const Item& b) { return a.range.address < b.range.address; });
}

GpuRanges::Stretch GpuRanges::at(uint64_t address, uint64_t num_bytes) const {
  const auto behind = std::upper_bound(
      regions_.begin(), regions_.end(), address,
      [](uint64_t address, const Item& item) { return address < item.range.address; });
  if (behind != regions_.begin()) {
    const Item& item = *std::prev(behind);
    const uint64_t offset = address - item.range.address;
    if (offset < item.range.num_bytes) {
      return {item.device, std::min(num_bytes, item.range.num_bytes - offset)};
    }
  }
  if (behind == regions_.end()) return {-1, num_bytes};
  return {-1, std::min(num_bytes, behind->range.address - address)};
}

}  // namespace mk::transfer
