// RegionTable: who removes a region that another removes as well.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "expect.h"
#include "transfer/region_table.h"

using namespace mk::transfer;

void Nics::remove(const NicMemory&) noexcept {}  // there are none

namespace {

constexpr Range kFirst{4096, 64}, kSecond{8192, 64};

void each_waits_for_that_region_alone() {
  RegionTable table;
  const auto board = std::make_shared<Board>();
  for (int round = 0; round < 200; ++round) {
    const RegionRef region = table.add({kFirst, kRemoteWrite});
    auto use = std::make_unique<BoardUse>(*board, table.offer(board).front().offer);
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
    // In the place on the board that is free now.
    const RegionRef next = table.add({kSecond, kRemoteWrite});
    use = std::make_unique<BoardUse>(*board, table.offer(board).front().offer);
    one.join();
    other.join();
    use.reset();
    EXPECT(table.remove(next));
    if (failures() != 0) return;
  }
}

}  // namespace

int main() {
  each_waits_for_that_region_alone();
  return failures() != 0;
}
