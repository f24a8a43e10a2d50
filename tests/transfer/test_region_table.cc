// RegionTable: ranges that are checked; regions that are removed by several threads, or closed
// while peers use them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/check.h"
#include "expect.h"
#include "transfer/base/error.h"
#include "transfer/memory/region_table.h"

using namespace mk::transfer;

void Nics::remove(const NicMemory&) noexcept {}  // there are none

namespace {

constexpr Range kFirst{4096, 64}, kSecond{8192, 64};

void each_waits_for_that_region_alone() {
  RegionTable table;
  const auto page = std::make_shared<ControlPage>(getpid());
  for (int round = 0; round < 200; ++round) {
    const RegionRef region = table.add({kFirst, kRemoteWrite});
    auto use = std::make_unique<ControlPageUse>(*page, table.offer(page).front().offer);
    std::atomic<int> num_over{0};
    const auto remove = [&] {
      EXPECT(table.remove(region));
      ++num_over;
    };
    std::thread one(remove), other(remove);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT(num_over == 0);
    use.reset();
    while (num_over == 0) {
    }
    // In the place on the control page that is free now.
    const RegionRef next = table.add({kSecond, kRemoteWrite});
    use = std::make_unique<ControlPageUse>(*page, table.offer(page).front().offer);
    one.join();
    other.join();
    use.reset();
    EXPECT(table.remove(next));
    if (failures() != 0) return;
  }
}

// So that a peer that was stopped in a copy of many regions holds close() up only once.
void close_withdraws_all_before_it_waits_for_any() {
  RegionTable table;
  const auto page = std::make_shared<ControlPage>(getpid());
  table.add({kFirst, kRemoteWrite});
  table.add({kSecond, kRemoteWrite});
  const auto offered = table.offer(page);
  auto use = std::make_unique<ControlPageUse>(*page, offered[0].offer);
  std::thread closing([&] { EXPECT(table.close()); });
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (ControlPageUse(*page, offered[1].offer) && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT(!ControlPageUse(*page, offered[1].offer));
  use.reset();
  closing.join();
}

// Ranges in a few regions, neighbours and not, some of which peers may not write: each by itself.
void each_range_is_checked() {
  std::mt19937_64 random(1);
  const auto pick = [&](uint64_t low, uint64_t high) { return low + random() % (high - low + 1); };
  for (int round = 0; round < 1000; ++round) {
    RegionTable table;
    std::vector<RegionRef> regions;
    uint64_t end = round % 2 ? 4096 : UINT64_MAX - 1000;
    for (uint64_t i = pick(1, 4); i > 0; --i) {
      const Range range{end + pick(0, 1) * 8, pick(1, 9) * 8};
      end = range.address + range.num_bytes;
      regions.push_back(table.add({range, pick(0, 6) ? kRemoteWrite : kRemoteRead}));
    }
    std::vector<Range> ranges;
    std::set<RegionRef> expected;
    std::string refusal;
    for (uint64_t i = pick(0, 20); i > 0; --i) {
      const Range outer = regions[pick(0, regions.size() - 1)]->range;
      const uint64_t offset = pick(0, outer.num_bytes - 1);
      Range range{outer.address + offset, pick(1, outer.num_bytes - offset)};
      if (pick(0, 30) == 0) range.num_bytes = pick(1, 80);
      if (pick(0, 30) == 0) range.num_bytes = UINT64_MAX - pick(0, 99);  // the sum wraps around
      const auto holds = [&](const RegionRef& region) { return region->range.contains(range); };
      const auto region = std::find_if(regions.begin(), regions.end(), holds);
      const bool is_fine = region != regions.end() && (*region)->rights == kRemoteWrite;
      if (is_fine) expected.insert(*region);
      if (!is_fine && refusal.empty()) {
        refusal = mk::concat("descriptors[", 7 + ranges.size(), "] remote range ", describe(range));
      }
      ranges.push_back(range);
    }
    try {
      const auto found = table.check(Ranges::rows(ranges), kRemoteWrite, "remote", 7);
      EXPECT(refusal.empty() && found.size() == expected.size());
      EXPECT(std::set<RegionRef>(found.begin(), found.end()) == expected);
    } catch (const Refused& refused) {
      EXPECT(!refusal.empty() && std::string(refused.what()).rfind(refusal + " ", 0) == 0);
    }
    if (failures() != 0) return;
  }
}

bool may_read(const RegionTable& table, const Range& range) {
  try {
    table.check(Ranges::rows({range}), kRemoteRead, "remote", 0);
    return true;
  } catch (const Refused&) {
    return false;
  }
}

// A reader that was stopped holds up no one; its place on the control page is free once it has
// noticed.
void a_closed_window_waits_for_no_process() {
  RegionTable table;
  const auto page = std::make_shared<ControlPage>(getpid());
  const RegionRef region = table.add({kFirst, kRemoteWindows});
  const Range part{4100, 10};
  EXPECT(!may_read(table, part));
  RegionRef window = table.open_window(region, part);
  EXPECT(may_read(table, part) && !may_read(table, {4099, 2}) && !may_read(table, {4100, 11}));
  const auto offered = table.offer(page);
  EXPECT(offered.size() == 2 && !(offered[0].rights & kRemoteRights));
  auto use = std::make_unique<ControlPageUse>(*page, offered[1].offer);
  table.close_window(window);
  EXPECT(!may_read(table, part) && !ControlPageUse(*page, offered[1].offer));
  window = table.open_window(region, part);
  EXPECT(table.offer(page)[1].offer.slot != offered[1].offer.slot);
  use.reset();
  table.close_window(window);
  window = table.open_window(region, part);
  EXPECT(table.offer(page)[1].offer.slot <= 2);
  EXPECT(table.remove(region) && !may_read(table, part));
  table.close_window(window);
}

}  // namespace

int main() {
  a_closed_window_waits_for_no_process();
  each_range_is_checked();
  each_waits_for_that_region_alone();
  close_withdraws_all_before_it_waits_for_any();
  return failures() != 0;
}
