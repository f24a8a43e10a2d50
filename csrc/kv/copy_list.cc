#include "kv/copy_list.h"

#include <algorithm>
#include <string>

#include "common/check.h"
#include "kv/copy_apart.h"

namespace mk::kv {
namespace {

constexpr int64_t kMaxAddress = int64_t{1} << 56;  // user space, with five levels of page tables
constexpr int64_t kMaxBytes = int64_t{1} << 47;

uint64_t as_address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

void check_numbers(int64_t index, int64_t src, int64_t dst, int64_t num_bytes) {
  MK_CHECK(0 <= num_bytes && num_bytes <= kMaxBytes, "copy_batch: sizes[", index,
           "] must be in [0, 2**47], got ", num_bytes);
  for (const bool is_src : {true, false}) {
    const int64_t address = is_src ? src : dst;
    MK_CHECK(0 < address && address <= kMaxAddress - num_bytes,
             "copy_batch: ", name_of({is_src, index, address}), " must be an address, got ",
             address);
  }
  MK_CHECK(src + num_bytes <= dst || dst + num_bytes <= src,
           "copy_batch: ", name_of({false, index, dst}), " must not overlap the ", num_bytes,
           " bytes at ", hex(src), ", got ", hex(dst));
}

// The allocations that the addresses of one side lie in.
class Side {
 public:
  Side(bool is_src, MemoryMap& map, CopyList& list) : is_src_(is_src), map_(map), list_(list) {}

  // Moves on to the allocation of the address; returns how many of the bytes lie in it.
  int64_t locate(int64_t index, int64_t address, int64_t num_bytes) {
    // Usually the same as the last one, which saves a query to the driver.
    if (!range_.contains(address)) enter({is_src_, index, address});
    if (is_pageable()) return num_bytes;
    return static_cast<int64_t>(std::min<uint64_t>(num_bytes, range_.end - address));
  }
  // The start of the allocation, within which ranges may be joined: a registration of pinned memory
  // may end in the middle of contiguous memory, and a copy engine does not copy across that.
  uint64_t begin() const { return is_pageable() ? 0 : range_.begin; }

  void check_like(const MemoryRange& first, int64_t index, const CopyArrays& arrays) const {
    const Place place{is_src_, index, (is_src_ ? arrays.src : arrays.dst)[index]};
    MK_CHECK(range_.is_like(first), "copy_batch: ", name_of(place), " must have sizes[", index,
             "] = ", arrays.num_bytes[index], " bytes in its allocation, got ", hex(place.address),
             ", whose allocation ends at ", hex(first.end));
  }
  const MemoryRange& range() const { return range_; }

 private:
  bool is_pageable() const { return range_.kind == MemoryKind::kPageable; }

  void enter(const Place& place) {
    range_ = map_.find(place.address);
    if (is_pageable() && !list_.pageable.exists()) list_.pageable = place;
    if (range_.kind != MemoryKind::kDevice) return;
    if (!list_.device.exists()) list_.device = place, list_.device_index = range_.device;
    MK_CHECK(range_.device == list_.device_index, "copy_batch: ", name_of(place),
             " must be on cuda:", list_.device_index, " as ", name_of(list_.device),
             ", got cuda:", range_.device);
  }

  const bool is_src_;
  MemoryMap& map_;
  CopyList& list_;
  MemoryRange range_;
};

// Joins it with the last range if it continues that one within the same allocations.
void append(CopyList& list, const CopyRange& range, uint64_t src_begin, uint64_t dst_begin) {
  list.num_bytes += range.num_bytes;
  if (!list.ranges.empty()) {
    CopyRange& last = list.ranges.back();
    const bool is_here = as_address(last.src) >= src_begin && as_address(last.dst) >= dst_begin;
    if (is_here && join(last, range)) return;
  }
  list.ranges.push_back(range);
}

// Throws if one entry writes what another one touches. Searches the ranges, of which there may be
// far fewer, and then finds the entries to name.
void check_apart(const CopyArrays& arrays, int64_t n, const std::vector<CopyRange>& ranges) {
  if (!find_conflict(what_may_meet(ranges))) return;
  std::vector<Touched> touched;
  for (int64_t i = 0; i < n; ++i) {
    const auto num_bytes = static_cast<uint64_t>(arrays.num_bytes[i]);
    if (num_bytes == 0) continue;
    touched.push_back({static_cast<uint64_t>(arrays.src[i]), num_bytes, i, false});
    touched.push_back({static_cast<uint64_t>(arrays.dst[i]), num_bytes, i, true});
  }
  const auto conflict = find_conflict(std::move(touched));
  const auto& [first, second] = conflict.value();
  const auto place = [](const Touched& one) {
    return Place{!one.is_written, one.index, static_cast<int64_t>(one.begin)};
  };
  MK_CHECK(false, "copy_batch: ", name_of(place(second)), " must not overlap ",
           name_of(place(first)), ", the ", first.num_bytes, " bytes at ", hex(first.begin),
           ", got ", second.num_bytes, " bytes at ", hex(second.begin));
}

}  // namespace

CopyList read_copy_list(const CopyArrays& arrays, int64_t n, MemoryMap& map) {
  CopyList list;
  list.ranges.reserve(n);
  Side src_side(true, map, list), dst_side(false, map, list);
  for (int64_t i = 0; i < n; ++i) {
    int64_t src = arrays.src[i], dst = arrays.dst[i], left = arrays.num_bytes[i];
    if (left == 0) continue;
    check_numbers(i, src, dst, left);
    MemoryRange src_first, dst_first;
    while (true) {
      const int64_t src_part = src_side.locate(i, src, left);
      const int64_t part = std::min(src_part, dst_side.locate(i, dst, left));
      if (left == arrays.num_bytes[i]) {
        src_first = src_side.range(), dst_first = dst_side.range();
      } else {  // it continues in another allocation, which must be of the same kind
        src_side.check_like(src_first, i, arrays), dst_side.check_like(dst_first, i, arrays);
      }
      append(list, {reinterpret_cast<const char*>(src), reinterpret_cast<char*>(dst), part},
             src_side.begin(), dst_side.begin());
      src += part, dst += part, left -= part;
      if (left == 0) break;
    }
  }
  check_apart(arrays, n, list.ranges);
  return list;
}

void translate_for_device(std::vector<CopyRange>& ranges, MemoryMap& map) {
  for (CopyRange& range : ranges) {
    range.src += map.find(as_address(range.src)).device_offset;
    range.dst += map.find(as_address(range.dst)).device_offset;
  }
}

std::string name_of(const Place& place) {
  return concat(place.is_src ? "src_ptrs[" : "dst_ptrs[", place.index, "]");
}

std::string hex(uint64_t address) {
  std::ostringstream out;
  out << "0x" << std::hex << address;
  return out.str();
}

}  // namespace mk::kv
