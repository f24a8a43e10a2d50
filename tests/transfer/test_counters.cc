// Counters and Stats: what is counted by many at once, and what is kept of peers that were left.
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "expect.h"
#include "transfer/peer/stats.h"

using namespace mk::transfer;
using std::chrono::nanoseconds;

namespace {

uint64_t num_over(const RequestCounters& requests) {
  return std::accumulate(requests.latency.begin(), requests.latency.end(), uint64_t{0},
                         [](uint64_t sum, const Counter& bucket) { return sum + bucket.get(); });
}

void count(const CountersRef& counters, Direction direction, uint64_t num_bytes, bool failed) {
  Counted(counters, direction, num_bytes).end(failed ? 0 : num_bytes, failed);
}

void buckets_are_powers_of_two_microseconds() {
  EXPECT(latency_bucket(nanoseconds(0)) == 0 && latency_bucket(nanoseconds(999)) == 0);
  EXPECT(latency_bucket(nanoseconds(-5)) == 0);
  for (size_t i = 1; i + 1 < kNumLatencyBuckets; ++i) {
    const int64_t bound_us = int64_t{1} << i;
    EXPECT(latency_bucket(nanoseconds(bound_us * 1000 - 1)) == i);
    EXPECT(latency_bucket(nanoseconds(bound_us * 1000)) == i + 1);
  }
  EXPECT(latency_bucket(nanoseconds::max()) == kNumLatencyBuckets - 1);
}

void requests_are_in_flight_until_they_are_over() {
  const auto stats = std::make_shared<Stats>();
  const CountersRef counters = stats->enter("a", Transport::kTcp);
  const RequestCounters& requests = counters->requests;
  Counted first(counters, Direction::kWrite, 100);
  {
    const Counted never_begun(counters, Direction::kRead, 7);
    EXPECT(requests.num_in_flight.get() == 2 && requests.num_bytes_in_flight.get() == 107);
  }
  EXPECT(requests.num_in_flight.get() == 1 && num_over(requests) == 0);
  first.end(60, true);
  EXPECT(requests.num_in_flight.get() == 0 && requests.num_bytes_in_flight.get() == 0);
  EXPECT(num_over(requests) == 1 && requests.num_errors.get() == 1);
  EXPECT(requests.num_bytes_written.get() == 60 && requests.num_bytes_read.get() == 0);
}

void nothing_is_lost_between_threads() {
  constexpr uint64_t kThreads = 4, kEach = 20000;
  const auto stats = std::make_shared<Stats>();
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (uint64_t i = 0; i < kEach; ++i) {
        const CountersRef counters = stats->enter("a", Transport::kShm);
        count(counters, Direction::kRead, 3, i % 4 == 0);
        counters->path("shm:" + std::to_string(i % 2)).num_pieces += 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto rows = stats->table();
  EXPECT(rows.size() == 1);
  const PeerCounters& counters = *rows[0].counters;
  EXPECT(num_over(counters.requests) == kThreads * kEach);
  EXPECT(counters.requests.num_errors.get() == kThreads * kEach / 4);
  EXPECT(counters.requests.num_bytes_read.get() == kThreads * kEach / 4 * 3 * 3);
  EXPECT(counters.paths().at("shm:0")->num_pieces.get() == kThreads * kEach / 2);
}

void the_peers_that_were_left_first_become_others() {
  constexpr uint64_t kMore = 50;
  const auto stats = std::make_shared<Stats>();
  const CountersRef open = stats->enter("open", Transport::kTcp);
  count(open, Direction::kWrite, 1, false);
  for (uint64_t i = 0; i < Stats::kMaxLeft + kMore; ++i) {
    const CountersRef counters = stats->enter("peer " + std::to_string(i), Transport::kTcp);
    count(counters, Direction::kWrite, 1000 + i, false);
    counters->path("tcp:0").num_pieces += 1;
    stats->enter("peer 0", Transport::kTcp);  // it is never the one that was left the longest ago
  }
  uint64_t num_bytes = 0, num_others = 0;
  bool has_first = false, has_open = false, has_second = false;
  const auto rows = stats->table();
  EXPECT(rows.size() == Stats::kMaxLeft + 2);  // and that which is open, and the others
  for (const Stats::Row& row : rows) {
    num_bytes += row.counters->requests.num_bytes_written.get();
    has_open |= row.peer == "open";
    has_first |= row.peer == "peer 0";
    has_second |= row.peer == "peer 1";
    if (row.peer != kOtherPeers) continue;
    num_others = num_over(row.counters->requests);
    EXPECT(row.counters->paths().at("tcp:0")->num_pieces.get() == num_others);
  }
  EXPECT(num_others == kMore);
  EXPECT(has_open && has_first && !has_second);
  constexpr uint64_t kAll = Stats::kMaxLeft + kMore;
  EXPECT(num_bytes == 1 + kAll * 1000 + kAll * (kAll - 1) / 2);
  EXPECT(num_over(open->requests) == 1);
}

}  // namespace

int main() {
  buckets_are_powers_of_two_microseconds();
  requests_are_in_flight_until_they_are_over();
  nothing_is_lost_between_threads();
  the_peers_that_were_left_first_become_others();
  return failures() != 0;
}
