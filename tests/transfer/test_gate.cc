// Admission and Links: who may come in, and who must have left before.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "expect.h"
#include "transfer/net/admission.h"
#include "transfer/net/links.h"
#include "transfer/wire/reject_reason.h"

using namespace mk::transfer;

namespace {

constexpr double kLongS = 20;

RejectReason verdict_of(Links& links, const LinkId& id, uint64_t epoch, double limit_s = kLongS) {
  Interrupt interrupt;
  try {
    links.enter(id, epoch, interrupt, {Deadline::after(limit_s), interrupt});
  } catch (const Rejected& rejected) {
    return rejected.reject_reason;
  }
  return RejectReason::kNone;
}

bool is_turned_away(Admission::Visit& visit) {
  try {
    visit.admit(true);
  } catch (const Rejected& rejected) {
    return rejected.reject_reason == RejectReason::kFull;
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
      visits.back().admit(true);
    }
    std::optional<Admission::Visit> visit = admission.enter(host);
    EXPECT(visit.has_value());
    EXPECT(is_turned_away(*visit));  // half of them are here
  }
  std::optional<Admission::Visit> visit = admission.enter("c");
  EXPECT(is_turned_away(*visit));  // all of them are here
  visits.pop_back();
  visit->admit(true);
}

struct Guest {
  explicit Guest(Admission& admission, const char* host) : visit(*admission.enter(host)) {
    visit.may_be_ended(interrupt);
  }
  Interrupt interrupt;
  Admission::Visit visit;
};
using Guests = std::vector<std::unique_ptr<Guest>>;

void come(Guests& guests, Admission& admission, const char* host, int count) {
  for (int i = 0; i < count; ++i) guests.push_back(std::make_unique<Guest>(admission, host));
}

size_t num_ended(const Guests& guests) {
  return std::count_if(guests.begin(), guests.end(),
                       [](const auto& guest) { return is_signalled(guest->interrupt); });
}

void a_newcomer_takes_the_place_of_one_that_says_nothing() {
  Admission admission;
  Guests speaking, silent, later;
  come(speaking, admission, "a", 28);
  for (const auto& guest : speaking) guest->visit.speaks();
  come(silent, admission, "a", 100);
  EXPECT(num_ended(silent) == 0);
  come(later, admission, "a", 60);
  for (int i = 0; i < 100; ++i) EXPECT(is_signalled(silent[i]->interrupt) == (i < 60));
  EXPECT(num_ended(speaking) == 0);
  for (const auto& guest : later) guest->visit.speaks();
  come(later, admission, "a", 40);
  EXPECT(num_ended(silent) == 100 && num_ended(speaking) + num_ended(later) == 0);
}

void of_those_that_speak_any_makes_room() {
  Admission admission;
  Guests first, later;
  come(first, admission, "a", 128);
  for (const auto& guest : first) guest->visit.speaks();
  come(later, admission, "a", 64);
  EXPECT(num_ended(first) == 32);  // those who have just come have time to speak
  for (int i = 0; i < 64; ++i) EXPECT(is_signalled(later[i]->interrupt) == (i < 32));
}

void hosts_of_few_are_spared() {
  Admission admission;
  Guests many, few, others, last;
  come(many, admission, "a", 128);
  come(others, admission, "b", 127);
  come(few, admission, "c", 1);
  come(last, admission, "d", 20);
  EXPECT(num_ended(few) == 0 && num_ended(many) + num_ended(others) == 20);
}

// Each has a thread, which takes a while to end.
void places_are_not_taken_faster_than_they_are_left() {
  Admission admission;
  Guests guests;
  come(guests, admission, "a", 128 + 256);
  EXPECT(!admission.enter("a"));
  guests.erase(guests.begin());
  EXPECT(admission.enter("a").has_value());
}

void an_idle_peer_that_has_proved_nothing_makes_room() {
  Admission admission({256, 8, std::chrono::nanoseconds(0)});
  Guests guests;
  come(guests, admission, "a", 6);
  for (int i = 0; i < 4; ++i) guests[i]->visit.admit(/*has_proved=*/i == 0);
  guests[1]->visit.is_busy(true);
  guests[2]->visit.is_busy(true);
  guests[2]->visit.is_busy(false);  // after the last one
  guests[4]->visit.admit(true);
  EXPECT(is_signalled(guests[3]->interrupt) && num_ended(guests) == 1);
  guests[5]->visit.admit(false);
  EXPECT(is_signalled(guests[2]->interrupt) && num_ended(guests) == 2);
  EXPECT(is_turned_away(guests[3]->visit));

  Admission patient({256, 8, std::chrono::hours(1)});
  Guests busy;
  come(busy, patient, "a", 5);
  for (int i = 0; i < 4; ++i) busy[i]->visit.admit(false);
  EXPECT(is_turned_away(busy[4]->visit) && num_ended(busy) == 0);
}

void a_later_connection_waits_for_the_one_before() {
  Links links;
  Interrupt first, second;
  auto hold = std::make_optional(links.enter({1, 2}, 5, first, {Deadline::after(kLongS), first}));
  EXPECT(verdict_of(links, {1, 2}, 5) == RejectReason::kOldEpoch);
  EXPECT(verdict_of(links, {1, 2}, 4) == RejectReason::kOldEpoch);
  EXPECT(!is_signalled(first));
  EXPECT(verdict_of(links, {1, 3}, 1) == RejectReason::kNone);
  EXPECT(verdict_of(links, {2, 2}, 1) == RejectReason::kNone);

  EXPECT(verdict_of(links, {1, 2}, 6, 0.01) == RejectReason::kStillBusy);
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
  EXPECT(verdict_of(links, {1, 2}, 7) == RejectReason::kOldEpoch);
  EXPECT(verdict_of(links, {1, 2}, 8) == RejectReason::kNone);
}

void one_that_waits_is_overtaken() {
  Links links;
  Interrupt first;
  auto hold = std::make_optional(links.enter({1, 2}, 1, first, {Deadline::after(kLongS), first}));
  std::thread overtaken([&] { EXPECT(verdict_of(links, {1, 2}, 2) == RejectReason::kOldEpoch); });
  std::thread last;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  // Is given less time, for it is let in only after the one that waits has been told.
  last =
      std::thread([&] { EXPECT(verdict_of(links, {1, 2}, 3, kLongS / 2) == RejectReason::kNone); });
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
  EXPECT(verdict_of(links, {1, 2}, 7) == RejectReason::kOldEpoch);
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
    EXPECT(verdict_of(links, {0, link}, 9) == RejectReason::kNone);
  }
  EXPECT(verdict_of(links, {0, 5'000}, 9) == RejectReason::kOldEpoch);
  EXPECT(verdict_of(links, {0, 1'000}, 9) == RejectReason::kOldEpoch);  // 4096 are kept in mind
  EXPECT(verdict_of(links, {0, 1}, 9) == RejectReason::kNone);
  EXPECT(verdict_of(links, {0, 0}, 9) == RejectReason::kOldEpoch);
}

// 100 frames of as many links as one may have, none of which was ever there.
void fences_without_end() {
  Links links;
  Interrupt interrupt;
  const auto hold = links.enter({0, 0}, 9, interrupt, {Deadline::after(kLongS), interrupt});
  for (uint64_t link = 1; link <= 100 * 4096; ++link) {
    links.fence({0, link}, 5, {Deadline::after(kLongS), interrupt});
  }
  EXPECT(!is_signalled(interrupt));
  EXPECT(verdict_of(links, {0, 100 * 4096}, 5) == RejectReason::kOldEpoch);
  EXPECT(verdict_of(links, {0, 1}, 5) == RejectReason::kNone);
  EXPECT(verdict_of(links, {0, 0}, 9) == RejectReason::kOldEpoch);
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
          EXPECT(rejected.reject_reason == RejectReason::kOldEpoch);
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
  a_newcomer_takes_the_place_of_one_that_says_nothing();
  of_those_that_speak_any_makes_room();
  hosts_of_few_are_spared();
  places_are_not_taken_faster_than_they_are_left();
  an_idle_peer_that_has_proved_nothing_makes_room();
  a_later_connection_waits_for_the_one_before();
  one_that_waits_is_overtaken();
  a_fence_ends_what_is_inside_and_lets_none_follow();
  a_fence_waits_for_the_lost_one_and_for_no_later_one();
  old_links_are_forgotten_those_in_use_are_not();
  fences_without_end();
  nobody_is_inside_twice();
  return failures();
}
