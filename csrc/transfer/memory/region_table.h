// RegionTable: the memory an engine may touch, and its current users.
//
//   RegionRef region = table.add({{address, num_bytes}, kRemoteWrite});
//   auto regions = table.check(ranges, kRemoteWrite, "remote", 0);   // or throws Refused
//   const Pin pin = table.pin(regions, interrupt);  // keeps them until ~Pin
//   table.remove(region);   // interrupts its pins, and waits for their ~Pin
//   RegionRef window = table.open_window(region, {address, num_bytes});  // peers may read this
//   part table.close_window(window);   // likewise
//
// Layer: transfer. Regions do not overlap: an address has one owner and one set of rights.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transfer/base/limit.h"
#include "transfer/base/range.h"
#include "transfer/memory/control_page.h"
#include "transfer/memory/nics.h"

namespace mk::transfer {

struct Region {
  Range range;
  Rights rights;
  int device = -1;                  // the GPU that holds the memory; -1: the host
  NicMemoryRef on_nics{};           // null: on none
  std::string note{};               // why not on all of them
  bool open = true;                 // this and `users` belong to the table, under its mutex
  std::vector<Interrupt*> users{};  // one entry per pin
  std::vector<std::pair<std::shared_ptr<ControlPage>, Offer>> offers{};  // to processes that map it
  uint64_t number = 0;  // counts the table's registrations
  // Whether some of it was found to be inaccessible.
  std::unique_ptr<std::atomic<bool>> is_doubted = std::make_unique<std::atomic<bool>>(false);
  // The table's, too.
  uint64_t num_openings = 0;                       // of a window
  std::vector<std::shared_ptr<Region>> windows{};  // that were open when it was removed
};
using RegionRef = std::shared_ptr<Region>;

std::string describe(const Range& range);  // "0x7f00 + 4096 bytes"

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
  RegionRef add(Region region);

  // After it returns true nothing touches the region. Waits only as long as its users need to
  // notice their interrupt; false: a peer on this machine that copies by itself does not notice,
  // because its process was stopped. Idempotent.
  bool remove(const RegionRef& region);

  // Lets peers read a part of a region that has kRemoteWindows, until it is closed as often as it
  // was opened, or the region is removed. Throws InvalidArgument: it is no part of such a region.
  RegionRef open_window(const RegionRef& region, const Range& range);

  // After it returns no connection reads the window, nor another engine of this process. A process
  // of this user that copies by itself is not waited for: it could access the memory anyway.
  void close_window(const RegionRef& window);

  // Removes every region; add() throws from now on. False: as in remove().
  bool close();

  std::vector<RegionRef> all() const;
  std::vector<RegionRef> windows() const;
  // The regions that contain any of the addresses, by address, each once. Of those with windows,
  // only where one is open at an address.
  std::vector<RegionRef> around(const std::vector<uint64_t>& addresses) const;

  // Puts all regions on a control page, as far as it has room, and returns which.
  struct Offered {
    Range range;
    Rights rights;
    int device;
    Offer offer;
  };
  std::vector<Offered> offer(const std::shared_ptr<ControlPage>& page);
  // No new use of a region by that control page begins; remove() still waits for current ones,
  // unless the page has ended.
  void forget(const std::shared_ptr<ControlPage>& page);

  // The regions that peers may use, at most that many, in the order of registration; the rights are
  // those of peers.
  struct Listed {
    Range range;
    Rights rights;
    int device;  // as the region's
  };
  std::vector<Listed> list(size_t most) const;

  // The regions in which the ranges lie, each range wholly inside one that has the rights.
  // Throws Refused: "descriptors[<first_index + i>] <side> range 0x... + 4096 bytes is ...".
  std::vector<RegionRef> check(const Ranges& ranges, Rights needed, const char* side,
                               uint64_t first_index) const;

  // Throws Refused if one of the regions has been removed.
  Pin pin(std::vector<RegionRef> regions, Interrupt& interrupt);

 private:
  friend class Pin;

  using Windows = std::map<std::pair<uint64_t, uint64_t>, RegionRef>;  // by address and size

  void withdraw(const RegionRef& region);
  static void end_uses(Region& region);
  void withdraw_windows(Region& region);
  void release_left();
  bool wait_until_unused(const RegionRef& region, const Deadline& deadline);
  const RegionRef* find(const Range& range) const;
  const RegionRef* find_window(const Range& range) const;
  const RegionRef* find_usable(const Range& range, Rights needed) const;
  template <class Visit>
  void for_each(const Visit& visit) const;
  static bool release_unused(Region& region);
  void unpin(const std::vector<RegionRef>& regions, Interrupt* interrupt);

  mutable std::mutex mutex_;
  std::condition_variable unpinned_;
  std::map<uint64_t, RegionRef> by_address_;
  Windows windows_;
  std::vector<RegionRef> in_use_;  // still, though they were removed
  uint64_t num_registrations_ = 0;
  bool closed_ = false;
};

}  // namespace mk::transfer
