#include "common/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace mk {
namespace {

constexpr uint64_t kNumSamples = 16;

}  // namespace

std::vector<int> numa_nodes_of(uint64_t address, uint64_t num_bytes) {
  std::array<void*, kNumSamples> pages;
  std::array<int, kNumSamples> nodes;
  const uint64_t page_bytes = sysconf(_SC_PAGESIZE);
  for (uint64_t i = 0; i < kNumSamples; ++i) {
    const uint64_t place = address + num_bytes / kNumSamples * i;
    pages[i] = reinterpret_cast<void*>(place / page_bytes * page_bytes);
    nodes[i] = -1;
  }
  // Without target nodes it moves nothing and reports where the pages are.
  const int self = 0;
  std::vector<int> found;
  if (syscall(SYS_move_pages, self, kNumSamples, pages.data(), nullptr, nodes.data(), 0) < 0) {
    return found;
  }
  for (const int node : nodes) {
    const bool is_new = std::find(found.begin(), found.end(), node) == found.end();
    if (node >= 0 && is_new) found.push_back(node);  // negative: an errno, e.g. for an absent page
  }
  return found;
}

}  // namespace mk
