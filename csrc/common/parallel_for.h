// A loop cut into equal parts, one a thread. For host families: what torch binds uses torch's own
// threads. Threads are started and joined at each call, so call it for 100 us of work and more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "common/math.h"

namespace mk {

// Calls body(begin, end) over parts that cover [0, n) once; returns when all of it is done.
// `body` must not throw.
template <class Body>
void parallel_for(int64_t n, int num_threads, const Body& body) {
  const int64_t part = ceil_div(n, std::max(num_threads, 1));
  std::vector<std::thread> threads;
  for (int64_t begin = part; begin < n; begin += part) {
    threads.emplace_back([&body, begin, end = std::min(begin + part, n)] { body(begin, end); });
  }
  if (n > 0) body(int64_t{0}, std::min(part, n));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mk
