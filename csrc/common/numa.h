// The location of memory.
//
// Layer: common.
#pragma once

#include <cstdint>
#include <vector>

namespace mk {

// The NUMA nodes of a sample of a range's resident pages, each once. Empty if the machine does not
// tell: containers often forbid the query.
std::vector<int> numa_nodes_of(uint64_t address, uint64_t num_bytes);

}  // namespace mk
