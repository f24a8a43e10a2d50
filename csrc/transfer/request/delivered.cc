#include "transfer/request/delivered.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace mk::transfer {

std::vector<bool> whole_descriptors(const Request& request, std::vector<Range> confirmed) {
  const auto is_before = [](const Range& a, const Range& b) { return a.address < b.address; };
  std::sort(confirmed.begin(), confirmed.end(), is_before);
  const auto& sizes = request.unmerged_sizes.empty() ? request.sizes : request.unmerged_sizes;
  std::vector<bool> whole;
  uint64_t begin = 0, reached = 0;  // reached: from `begin` or before, all is confirmed up to here
  for (size_t i = 0, next = 0; begin < request.num_bytes; ++i) {
    const uint64_t end = begin + sizes[sizes.size() == 1 ? 0 : i];
    while (next < confirmed.size() && reached < end) {
      const Range& range = confirmed[next];
      const bool leaves_gap = range.address > std::max(reached, begin);
      if (leaves_gap) break;
      reached = range.address + range.num_bytes;
      ++next;
    }
    whole.push_back(reached >= end);
    begin = end;
  }
  return whole;
}

}  // namespace mk::transfer
