// Counters: an engine's requests to one peer by one transport, and their outcomes.
//
//   Counted counted(counters, Direction::kWrite, num_bytes);   // a request begins: it is in flight
//   counted.end(num_bytes_done, failed);                       // and is over
//   counters->path("tcp:0").num_pieces += 1;                   // a channel's; keep the reference
//
// Layer: transfer. Thread-safe. Counting is a few relaxed additions, without a lock.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "transfer/request/request.h"

namespace mk::transfer {

// Relaxed, because it orders nothing: several read together may be from slightly different moments.
class Counter {
 public:
  void operator+=(uint64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  void operator-=(uint64_t n) { value_.fetch_sub(n, std::memory_order_relaxed); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Bucket i counts requests that took less than 2^i microseconds and are in no lower bucket; the
// last one, all that took longer (67 s).
constexpr size_t kNumLatencyBuckets = 28;
size_t latency_bucket(std::chrono::nanoseconds duration);

// Of requests. The number of finished ones is the sum of the buckets.
struct RequestCounters {
  Counter num_bytes_read;  // confirmed bytes, including those of requests that failed later
  Counter num_bytes_written;
  Counter num_errors;  // requests that failed, were cancelled or ran out of time
  Counter num_in_flight;
  Counter num_bytes_in_flight;  // all bytes of such requests, until they finish
  Counter total_ns;             // time taken by finished requests
  std::array<Counter, kNumLatencyBuckets> latency;

  void add(const RequestCounters& other);
};

// Of one channel: a connection, or the traffic through one NIC.
struct PathCounters {
  Counter num_bytes_read;
  Counter num_bytes_written;
  Counter num_pieces;      // parts of requests it has moved
  Counter num_retries;     // works that it lost and that were then retried
  Counter num_reconnects;  // times it was connected, after the first
  Counter num_failures;    // times it was lost, or could not be connected

  void add(const PathCounters& other);
};

class PeerCounters {
 public:
  RequestCounters requests;

  // The counters of that path, at a fixed address while this object lives.
  PathCounters& path(const std::string& name);
  std::map<std::string, const PathCounters*> paths() const;

  void add(const PeerCounters& other);

 private:
  mutable std::mutex mutex_;  // of the map, not of what is in it
  std::map<std::string, PathCounters> paths_;
};
using CountersRef = std::shared_ptr<PeerCounters>;

// A counted request: in flight until it ends, or until this object is destroyed.
class Counted {
 public:
  Counted(CountersRef counters, Direction direction, uint64_t num_bytes);
  Counted(Counted&&) = default;
  ~Counted() { leave(); }

  void end(uint64_t num_bytes_done, bool failed);  // once

 private:
  void leave();

  CountersRef counters_;  // null once it is over: a ticket may be kept for long
  const Direction direction_;
  const uint64_t num_bytes_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace mk::transfer
