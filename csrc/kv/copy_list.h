// CopyList: what copy_batch is asked to copy, checked, located, and with neighbours joined.
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

// The arrays of copy_batch, each of n.
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
  std::vector<CopyRange> ranges;  // none is empty, none leaves the allocations it begins in
  int64_t num_bytes = 0;
  Place device;               // the first address in a GPU's memory
  int32_t device_index = -1;  // of that GPU; all are of this one
  Place pageable;             // the first that no GPU can reach
};

// Throws InvalidArgument, naming argument, index, expectation and value: a size that is negative or
// absurd, a null address, an entry that writes what it or another one touches, a range that leaves
// its allocation, addresses of two GPUs. Entries of no bytes are skipped, their addresses not
// looked at.
CopyList read_copy_list(const CopyArrays& arrays, int64_t n, MemoryMap& map);

// Host addresses in place of which a GPU uses others (rare: under unified addressing it does not).
void translate_for_device(std::vector<CopyRange>& ranges, MemoryMap& map);

// "src_ptrs[3]"
std::string name_of(const Place& place);
std::string hex(uint64_t address);

}  // namespace mk::kv
