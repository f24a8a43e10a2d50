// A loop cut into equal parts, one per thread. For host families: operators bound by torch use
// torch's own threads. Each call starts and joins threads, so use it for 100 us of work and more.
//
// Layer: common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "common/math.h"
#include "common/thread.h"

namespace mk {

// Calls body(begin, end) on parts that cover [0, n) once; returns when all are done. `body` must
// not throw. Parts for which no thread can be started run on the caller's.
template <class Body>
void parallel_for(int64_t n, int num_threads, const Body& body) {
  const int64_t part = ceil_div(n, std::max(num_threads, 1));
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(std::max(num_threads, 1)));
  int64_t left = part;  // start of the parts without a thread
  try {
    for (; left < n; left += part) {
      threads.push_back(start_thread(
          [&body, begin = left, end = std::min(left + part, n)] { body(begin, end); }));
    }
  } catch (const SystemError&) {
  }
  if (n > 0) body(int64_t{0}, std::min(part, n));
  if (left < n) body(left, n);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mk
