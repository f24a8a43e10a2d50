// The kernels of ready_flags on the CPU: what the other side does comes from another thread.
#include <chrono>
#include <thread>

#include "emulator/cuda_on_cpu.h"
#include "expect.h"
#include "kv/ready_flags_kernel.cuh"

namespace {

using namespace mk::kv;

constexpr int64_t kLongNs = 20'000'000'000, kShortNs = 1'000'000;

void signal(int64_t* flag, int64_t value, const int64_t* base = nullptr) {
  emu::run(signal_flag_kernel, {1, 1}, SignalFlagParams{flag, {value, base}});
}

void wait(const int64_t* flag, int64_t value, const int64_t* base, WaitReport* report,
          int64_t timeout_ns) {
  emu::run(wait_flag_kernel, {1, 1}, WaitFlagParams{flag, {value, base}, report, timeout_ns});
}

// As a graph: the same arguments at each replay, and a step that is counted in memory.
void check_replays() {
  int64_t flags[3]{}, step = 0;
  WaitReport report{};
  for (int64_t replay = 1; replay <= 5; ++replay) {
    ++step;
    signal(&flags[1], 0, &step);
    EXPECT(flags[0] == 0 && flags[1] == replay && flags[2] == 0);
    wait(&flags[1], 0, &step, &report, kShortNs);
    EXPECT(report.state == 0);
  }
  signal(&flags[2], 7);
  EXPECT(flags[2] == 7);
  wait(&flags[2], 2, &step, &report, kShortNs);  // 2 + 5
  EXPECT(report.state == 0);
}

// The first wait that is given up is reported, and the others do not wait any more.
void check_timeout() {
  int64_t flags[2]{4, 4};
  const int64_t step = 5;
  WaitReport report{};
  wait(&flags[1], 0, &step, &report, kShortNs);
  EXPECT(report.state == WaitReport::kTimedOut);
  EXPECT(report.flag == reinterpret_cast<int64_t>(&flags[1]));
  EXPECT(report.wanted == 5 && report.seen == 4);
  wait(&flags[0], 1, &step, &report, kLongNs);
  EXPECT(report.flag == reinterpret_cast<int64_t>(&flags[1]) && report.wanted == 5);
  wait(&flags[0], 0, &step, nullptr, kShortNs);  // with no one to tell
}

// What was written before a signal is seen behind the wait.
void check_a_signal_while_waiting() {
  int64_t flag = 0, data = 0;
  WaitReport report{};
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    data = 42;
    SignalFlagParams{&flag, {1, nullptr}}.run();
  });
  wait(&flag, 1, nullptr, &report, kLongNs);
  EXPECT(data == 42 && report.state == 0);
  other.join();
}

void check_an_abort_while_waiting() {
  int64_t flag = 0;
  WaitReport report{};
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    store_release(&report.state, WaitReport::kAborted);
  });
  const WaitFlagParams params{&flag, {1, nullptr}, &report, kLongNs};
  EXPECT(params.run() == WaitResult::kGivenUp);
  EXPECT(params.run() == WaitResult::kGivenUp);  // whoever comes later does not wait either
  other.join();
}

void check_claim() {
  int64_t word = 0;
  EXPECT(claim(&word, 3) && word == 3);
  EXPECT(!claim(&word, 4) && word == 3);
}

}  // namespace

int main() {
  check_replays();
  check_timeout();
  check_a_signal_while_waiting();
  check_an_abort_while_waiting();
  check_claim();
  return failures();
}
