// CopyList: the copies requested of copy_batch: checked, located, and with neighbours joined.
//
//   MemoryMap map;
//   CopyList list = read_copy_list(arrays, n, map);
//
// Layer: kv.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/memory_kind.h"
#include "kv/copy_range.h"

namespace mk::kv {

// The arguments of copy_batch: arrays of n.
struct CopyArrays {
  const int64_t* src;
  const int64_t* dst;
  const int64_t* num_bytes;
};

// One address among the arguments, for errors.
struct Place {
  bool is_src = false;
  int64_t index = -1;  // none
  int64_t address = 0;

  bool exists() const { return index >= 0; }
};

struct CopyList {
  std::vector<CopyRange> ranges;  // none is empty; each stays within its two allocations
  int64_t num_bytes = 0;
  Place device;               // the first address in a GPU's memory
  int32_t device_index = -1;  // its GPU, the only one involved
  Place pageable;             // the first address that no GPU can reach
};

// Throws InvalidArgument, naming argument, index, expectation and value: a size that is negative or
// absurd, a null address, an entry that writes what it or another one touches, a range that leaves
// its allocation, addresses of two GPUs. Entries of no bytes are skipped, and their addresses
// ignored.
CopyList read_copy_list(const CopyArrays& arrays, int64_t n, MemoryMap& map);

// Translates host addresses for which a GPU uses different ones (rare: with unified addressing it
// does not).
void translate_for_device(std::vector<CopyRange>& ranges, MemoryMap& map);

// "src_ptrs[3]"
std::string name_of(const Place& place);
std::string hex(uint64_t address);

}  // namespace mk::kv
