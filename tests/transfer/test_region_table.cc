// RegionTable: regions that are removed by several threads, or closed while peers use them.
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
  const auto board = std::make_shared<Board>(getpid());
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

// So that a peer that was stopped in a copy of many regions holds close() up only once.
void close_withdraws_all_before_it_waits_for_any() {
  RegionTable table;
  const auto board = std::make_shared<Board>(getpid());
  table.add({kFirst, kRemoteWrite});
  table.add({kSecond, kRemoteWrite});
  const auto offered = table.offer(board);
  auto use = std::make_unique<BoardUse>(*board, offered[0].offer);
  std::thread closing([&] { EXPECT(table.close()); });
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (BoardUse(*board, offered[1].offer) && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT(!BoardUse(*board, offered[1].offer));
  use.reset();
  closing.join();
}

}  // namespace

int main() {
  each_waits_for_that_region_alone();
  close_withdraws_all_before_it_waits_for_any();
  return failures() != 0;
}
