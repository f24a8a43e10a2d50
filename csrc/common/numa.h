// Where memory is.
#pragma once

#include <cstdint>
#include <vector>

namespace mk {

// The NUMA nodes of some pages of a range, each once, that are in memory already. Empty if the
// machine does not tell: containers are often not allowed to ask.
std::vector<int> numa_nodes_of(uint64_t address, uint64_t num_bytes);

}  // namespace mk
