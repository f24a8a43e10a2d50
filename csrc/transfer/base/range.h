// Range: bytes from an address on; Rights: the allowed uses of them.
//
// Layer: transfer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mk::transfer {

struct Range {
  uint64_t address;
  uint64_t num_bytes;

  // Does not add untrusted numbers, which might wrap around.
  bool contains(const Range& inner) const {
    return inner.address >= address && inner.num_bytes <= num_bytes &&
           inner.address - address <= num_bytes - inner.num_bytes;
  }
};

// Ranges as columns or rows of 64-bit numbers: `step` numbers from one range to the next.
struct Ranges {
  const uint64_t* addresses;
  size_t address_step;
  const uint64_t* sizes;
  size_t size_step;
  size_t count;

  static Ranges rows(const std::vector<Range>& table) {
    if (table.empty()) return {};
    return {&table[0].address, 2, &table[0].num_bytes, 2, table.size()};
  }
  Range operator[](size_t i) const { return {addresses[i * address_step], sizes[i * size_step]}; }
  Ranges part(size_t first, size_t num_ranges) const {
    return {addresses + first * address_step, address_step, sizes + first * size_step, size_step,
            num_ranges};
  }
};

// Which of some regions, sorted by address, contains the range; end(): none.
template <class Regions, class RangeOf>
auto find_region(const Regions& regions, const Range& range, RangeOf range_of) {
  const auto behind = std::upper_bound(
      regions.begin(), regions.end(), range.address,
      [&](uint64_t address, const auto& region) { return address < range_of(region).address; });
  const bool is_inside = behind != regions.begin() && range_of(*(behind - 1)).contains(range);
  return is_inside ? behind - 1 : regions.end();
}

// The allowed uses of a region, besides reading it from its own engine. Bits.
using Rights = uint32_t;
constexpr Rights kLocalWrite = 1;
constexpr Rights kRemoteRead = 2;
constexpr Rights kRemoteWrite = 4;
constexpr Rights kRemoteWindows = 8;  // peers may read what windows are open on (region_table.h)
constexpr Rights kRemoteRights = kRemoteRead | kRemoteWrite;

// What NICs are told: they know no windows.
constexpr Rights nic_rights(Rights rights) {
  return (rights & (kLocalWrite | kRemoteRights)) | (rights & kRemoteWindows ? kRemoteRead : 0);
}

}  // namespace mk::transfer
