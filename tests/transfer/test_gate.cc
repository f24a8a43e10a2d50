// Admission and Links: who may come in, and who must have left before.
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"
#include "transfer/verdict.h"
#include "transfer/wire/admission.h"
#include "transfer/wire/links.h"

using namespace mk::transfer;

namespace {

constexpr double kLongS = 20;

Verdict verdict_of(Links& links, const LinkId& id, uint64_t epoch, double limit_s = kLongS) {
  Interrupt interrupt;
  try {
    links.enter(id, epoch, interrupt, {Deadline::after(limit_s), interrupt});
  } catch (const Rejected& rejected) {
    return rejected.verdict;
  }
  return Verdict::kWelcome;
}

bool is_turned_away(Admission::Visit& visit) {
  try {
    visit.admit();
  } catch (const Rejected& rejected) {
    return rejected.verdict == Verdict::kFull;
  }
  return false;
}

bool is_signalled(const Interrupt& interrupt) {
  try {
    interrupt.check();
  } catch (const Failure&) {
    return true;
  }
  return false;
}

void strangers_of_one_host_leave_room_for_others() {
  Admission admission;
  std::vector<Admission::Visit> visits;
  while (auto visit = admission.enter("a")) visits.push_back(std::move(*visit));
  EXPECT(visits.size() == 128);
  while (auto visit = admission.enter("b")) visits.push_back(std::move(*visit));
  EXPECT(visits.size() == 256);
  EXPECT(!admission.enter("c"));
  for (int i = 0; i < 3; ++i) visits.pop_back();
  for (int i = 0; i < 3; ++i) visits.push_back(std::move(*admission.enter("c")));
  EXPECT(!admission.enter("a") && !admission.enter("c"));
  visits.clear();
  for (int i = 0; i < 128; ++i) visits.push_back(std::move(*admission.enter("a")));
}

void peers_do_not_count_as_strangers() {
  Admission admission;
  std::vector<Admission::Visit> visits;
  for (const char* host : {"a", "b"}) {
    for (int i = 0; i < 1024; ++i) {
      visits.push_back(std::move(*admission.enter(host)));
      visits.back().admit();
    }
    std::optional<Admission::Visit> visit = admission.enter(host);
    EXPECT(visit.has_value());
    EXPECT(is_turned_away(*visit));  // half of them are here
  }
  std::optional<Admission::Visit> visit = admission.enter("c");
  EXPECT(is_turned_away(*visit));  // all of them are here
  visits.pop_back();
  visit->admit();
}

void a_later_connection_waits_for_the_one_before() {
  Links links;
  Interrupt first, second;
  auto hold = std::make_optional(links.enter({1, 2}, 5, first, {Deadline::after(kLongS), first}));
  EXPECT(verdict_of(links, {1, 2}, 5) == Verdict::kOldEpoch);
  EXPECT(verdict_of(links, {1, 2}, 4) == Verdict::kOldEpoch);
  EXPECT(!is_signalled(first));
  EXPECT(verdict_of(links, {1, 3}, 1) == Verdict::kWelcome);
  EXPECT(verdict_of(links, {2, 2}, 1) == Verdict::kWelcome);

  EXPECT(verdict_of(links, {1, 2}, 6, 0.01) == Verdict::kStillBusy);
  EXPECT(is_signalled(first));
  std::atomic<bool> has_left{false};
  std::thread later([&] {
    const auto mine = links.enter({1, 2}, 7, second, {Deadline::after(kLongS), second});
    EXPECT(has_left);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  has_left = true;
  hold.reset();
  later.join();
  EXPECT(verdict_of(links, {1, 2}, 7) == Verdict::kOldEpoch);
  EXPECT(verdict_of(links, {1, 2}, 8) == Verdict::kWelcome);
}

void one_that_waits_is_overtaken() {
  Links links;
  Interrupt first;
  auto hold = std::make_optional(links.enter({1, 2}, 1, first, {Deadline::after(kLongS), first}));
  std::thread overtaken([&] { EXPECT(verdict_of(links, {1, 2}, 2) == Verdict::kOldEpoch); });
  std::thread last;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  // Is given less time, for it is let in only after the one that waits has been told.
  last =
      std::thread([&] { EXPECT(verdict_of(links, {1, 2}, 3, kLongS / 2) == Verdict::kWelcome); });
  overtaken.join();
  hold.reset();
  last.join();
}

std::unique_ptr<Links::Hold> enter(Links& links, uint64_t epoch, Interrupt& interrupt) {
  return std::make_unique<Links::Hold>(
      links.enter({1, 2}, epoch, interrupt, {Deadline::after(kLongS), interrupt}));
}

bool is_fenced_in_time(Links& links, uint64_t epoch, double limit_s = kLongS) {
  Interrupt interrupt;
  try {
    links.fence({1, 2}, epoch, {Deadline::after(limit_s), interrupt});
  } catch (const Refused&) {
    return false;
  }
  return true;
}

void a_fence_ends_what_is_inside_and_lets_none_follow() {
  Links links;
  Interrupt first, second;
  auto hold = enter(links, 5, first);
  EXPECT(is_fenced_in_time(links, 4));  // that one has left before this one came
  EXPECT(!is_signalled(first));
  EXPECT(!is_fenced_in_time(links, 5, 0.01));
  EXPECT(is_signalled(first));
  hold.reset();
  EXPECT(is_fenced_in_time(links, 5));
  EXPECT(is_fenced_in_time(links, 7));  // of which nothing has come
  EXPECT(verdict_of(links, {1, 2}, 7) == Verdict::kOldEpoch);
  EXPECT(enter(links, 8, second) && !is_signalled(second));
}

// The connection that is lost is fenced by one lane, and made anew by its own meanwhile.
void a_fence_waits_for_the_lost_one_and_for_no_later_one() {
  for (int i = 0; i < 200; ++i) {  // who is woken first is the kernel's choice
    Links links;
    Interrupt first, second;
    auto lost = enter(links, 1, first);
    std::unique_ptr<Links::Hold> later;
    std::atomic<bool> has_left{false};
    std::thread connects([&] { later = enter(links, 2, second); });
    std::thread fences([&] {
      EXPECT(is_fenced_in_time(links, 1));
      EXPECT(has_left);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    has_left = true;
    lost.reset();
    connects.join();
    fences.join();
    EXPECT(!is_signalled(second));
  }
}

void old_links_are_forgotten_those_in_use_are_not() {
  Links links;
  Interrupt interrupt;
  const auto hold = links.enter({0, 0}, 9, interrupt, {Deadline::after(kLongS), interrupt});
  for (uint64_t link = 1; link <= 5'000; ++link) {
    EXPECT(verdict_of(links, {0, link}, 9) == Verdict::kWelcome);
  }
  EXPECT(verdict_of(links, {0, 5'000}, 9) == Verdict::kOldEpoch);
  EXPECT(verdict_of(links, {0, 1'000}, 9) == Verdict::kOldEpoch);  // 4096 are kept in mind
  EXPECT(verdict_of(links, {0, 1}, 9) == Verdict::kWelcome);
  EXPECT(verdict_of(links, {0, 0}, 9) == Verdict::kOldEpoch);
}

// However many enter and leave, one is inside, and the epochs that are let in rise.
void nobody_is_inside_twice() {
  Links links;
  std::atomic<int> num_inside{0};
  std::atomic<uint64_t> epoch{0}, highest{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 2000; ++i) {
        Interrupt interrupt;
        const uint64_t mine = ++epoch - random() % 2;
        try {
          const auto hold =
              links.enter({1, 1}, mine, interrupt, {Deadline::after(kLongS), interrupt});
          EXPECT(++num_inside == 1);
          EXPECT(highest.exchange(mine) < mine);
          while (random() % 4 && !is_signalled(interrupt)) std::this_thread::yield();
          --num_inside;
        } catch (const Rejected& rejected) {
          EXPECT(rejected.verdict == Verdict::kOldEpoch);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  strangers_of_one_host_leave_room_for_others();
  peers_do_not_count_as_strangers();
  a_later_connection_waits_for_the_one_before();
  one_that_waits_is_overtaken();
  a_fence_ends_what_is_inside_and_lets_none_follow();
  a_fence_waits_for_the_lost_one_and_for_no_later_one();
  old_links_are_forgotten_those_in_use_are_not();
  nobody_is_inside_twice();
  return failures();
}
