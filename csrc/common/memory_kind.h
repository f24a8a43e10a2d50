// Where an address is: in pageable host memory, in pinned host memory, or on which GPU.
//
//   MemoryMap map;
//   MemoryRange range = map.find(address);  // what it belongs to, from begin to end
//
// The CUDA driver is asked only if somebody has loaded it and made a context: without one there is
// nothing but host memory, and a program that uses no GPU shall not begin to.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace mk {

enum class MemoryKind { kPageable, kPinned, kDevice };

// An allocation that the driver knows, or memory that it does not know.
struct MemoryRange {
  MemoryKind kind = MemoryKind::kPageable;
  int32_t device = -1;         // of kDevice: CUDA's ordinal
  uint64_t device_offset = 0;  // of kPinned: added to an address, what a GPU calls it
  uint64_t begin = 0;          // addresses
  uint64_t end = 0;

  bool contains(uint64_t address) const { return begin <= address && address < end; }
  bool is_like(const MemoryRange& other) const {
    return kind == other.kind && device == other.device && device_offset == other.device_offset;
  }
};

// Short-lived: what it has learned is true as long as nothing is freed.
class MemoryMap {
 public:
  // Makes the context of a GPU current for as long as it lives, if this thread has none and there
  // is one.
  MemoryMap();
  ~MemoryMap();
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;

  // What is pageable is known at that one address only, unless there is no context: then all is.
  // Throws CudaError.
  MemoryRange find(uint64_t address);

 private:
  MemoryRange ask(uint64_t address) const;

  bool has_context_ = false;
  int pushed_device_ = -1;  // whose context is current because of this; -1 if none is
  std::map<uint64_t, MemoryRange> known_;  // by where they end
};

// What is added to the addresses of that host memory to have those of a GPU; nothing if a part of
// it is not pinned, or is not called alike. Throws CudaError.
std::optional<uint64_t> device_offset_of(MemoryMap& map, uint64_t address, uint64_t num_bytes);

}  // namespace mk
