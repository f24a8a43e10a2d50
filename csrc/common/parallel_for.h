// A loop cut into equal parts, one a thread. For host families: what torch binds uses torch's own
// threads. Threads are started and joined at each call, so call it for 100 us of work and more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "common/math.h"
#include "common/thread.h"

namespace mk {

// Calls body(begin, end) over parts that cover [0, n) once; returns when all of it is done.
// `body` must not throw. Parts for which the machine gives no more threads run on the caller's.
template <class Body>
void parallel_for(int64_t n, int num_threads, const Body& body) {
  const int64_t part = ceil_div(n, std::max(num_threads, 1));
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(std::max(num_threads, 1)));
  int64_t left = part;  // where the parts begin that no thread has taken
  try {
    for (; left < n; left += part) {
      threads.push_back(start_thread(
          [&body, begin = left, end = std::min(left + part, n)] { body(begin, end); }));
    }
  } catch (const std::system_error&) {
  }
  if (n > 0) body(int64_t{0}, std::min(part, n));
  if (left < n) body(left, n);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mk
