// RegionTable: the memory an engine may touch, and who is touching it now.
//
//   auto regions = table.check(ranges, kRemoteWrite, "remote", 0);   // or throws Refused
//   const Pin pin = table.pin(regions, interrupt);  // until ~Pin they cannot go away
//   table.remove(region);   // signals the interrupts of those who pin it, waits for their ~Pin
//
// Layer: transfer. Regions do not overlap: an address has one owner and one set of rights.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transfer/board.h"
#include "transfer/limit.h"

namespace mk::transfer {

struct Range {
  uint64_t address;
  uint64_t num_bytes;
};

// Ranges as columns, or as rows, of 64-bit numbers: `step` of them from one range to the next.
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

// What may be done with a region, besides reading it from its own engine. Bits.
using Rights = uint32_t;
constexpr Rights kLocalWrite = 1;
constexpr Rights kRemoteRead = 2;
constexpr Rights kRemoteWrite = 4;

struct Region {
  Range range;
  Rights rights;
  bool open = true;                 // this and `users` belong to the table, under its mutex
  std::vector<Interrupt*> users{};  // one entry a pin
  std::vector<std::pair<std::shared_ptr<Board>, Offer>> offers{};  // to processes that map it
};
using RegionRef = std::shared_ptr<Region>;

class RegionTable;

class Pin {
 public:
  Pin(RegionTable& table, std::vector<RegionRef> regions, Interrupt& interrupt)
      : table_(&table), regions_(std::move(regions)), interrupt_(&interrupt) {}
  Pin(const Pin&) = delete;
  ~Pin();

 private:
  RegionTable* table_;
  std::vector<RegionRef> regions_;
  Interrupt* interrupt_;
};

class RegionTable {
 public:
  // Throws InvalidArgument: empty, overlapping another region, or the table is closed.
  RegionRef add(const Range& range, Rights rights);

  // After it returns true nobody touches the region. Waits only as long as its users need to notice
  // that they are interrupted; false: a peer on this machine that copies by itself does not notice,
  // because someone has stopped it. Idempotent.
  bool remove(const RegionRef& region);

  // Removes every region; add() throws from now on. False: as of remove().
  bool close();

  // Puts all regions on a board, as far as it has room, and tells which.
  struct Offered {
    Range range;
    Rights rights;
    Offer offer;
  };
  std::vector<Offered> offer(const std::shared_ptr<Board>& board);
  void forget(const std::shared_ptr<Board>& board);  // which has ended

  // The regions in which the ranges lie, each range wholly inside one that has the rights.
  // Throws Refused: "descriptors[<first_index + i>] <side> range 0x... + 4096 bytes is ...".
  std::vector<RegionRef> check(const Ranges& ranges, Rights needed, const char* side,
                               uint64_t first_index) const;

  // Throws Refused if one of the regions was removed since.
  Pin pin(std::vector<RegionRef> regions, Interrupt& interrupt);

 private:
  friend class Pin;

  const RegionRef* find(const Range& range) const;
  void unpin(const std::vector<RegionRef>& regions, Interrupt* interrupt);

  mutable std::mutex mutex_;
  std::condition_variable unpinned_;
  std::map<uint64_t, RegionRef> by_address_;
  bool closed_ = false;
};

}  // namespace mk::transfer
