#include "kv/ready_flags.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace mk::kv {

int64_t host_now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// The flag may be set by a GPU or a NIC, which wakes no thread, so the caller polls: at first
// without a pause, then after a sixteenth of the time waited so far.
void host_pause(int64_t waited_ns) {
  constexpr int64_t kAwakeNs = 50'000;  // the actual duration of the shortest sleep on Linux
  constexpr int64_t kLongestNs = 200'000;
  if (waited_ns < kAwakeNs) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(waited_ns / 16, kLongestNs)));
}

}  // namespace mk::kv
