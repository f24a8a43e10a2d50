// What kind of memory an address is in: pageable host memory, pinned host memory, or a GPU.
//
//   MemoryMap map;
//   MemoryRange range = map.find(address);  // the memory it belongs to, from begin to end
//
// The CUDA driver is queried only if it is loaded and has a context: without a context there is
// nothing but host memory, and a program that uses no GPU shall not start to use one.
//
// Layer: common.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace mk {

enum class MemoryKind { kPageable, kPinned, kDevice };

// An allocation known to the driver, or memory unknown to it.
struct MemoryRange {
  MemoryKind kind = MemoryKind::kPageable;
  int32_t device = -1;         // for kDevice: the CUDA ordinal
  uint64_t device_offset = 0;  // for kPinned: added to an address, gives the GPU's
  uint64_t begin = 0;          // address
  uint64_t end = 0;

  bool contains(uint64_t address) const { return begin <= address && address < end; }
  bool is_like(const MemoryRange& other) const {
    return kind == other.kind && device == other.device && device_offset == other.device_offset;
  }
};

// Short-lived: its cached results are valid as long as nothing is freed.
class MemoryMap {
 public:
  // Makes a GPU's context current while the object lives, if this thread has none and one exists.
  MemoryMap();
  ~MemoryMap();
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;

  // For pageable memory, the result covers that one address only, unless there is no context: then
  // it covers everything. Throws CudaError.
  MemoryRange find(uint64_t address);

 private:
  MemoryRange ask(uint64_t address) const;

  bool has_context_ = false;
  int pushed_device_ = -1;                 // whose context this object made current; -1: none
  std::map<uint64_t, MemoryRange> known_;  // by end address
};

// The offset that turns addresses of that host memory into the GPU's; empty if part of it is not
// pinned, or has a different offset. Throws CudaError.
std::optional<uint64_t> device_offset_of(MemoryMap& map, uint64_t address, uint64_t num_bytes);

}  // namespace mk
