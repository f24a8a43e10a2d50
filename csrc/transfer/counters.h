// Counters: what an engine has asked of one peer by one transport, and what came of it.
//
//   Counted counted(counters, Direction::kWrite, num_bytes);   // a request begins: it is in flight
//   counted.end(num_bytes_done, failed);                       // and is over
//   counters->path("tcp:0").num_pieces += 1;                   // a channel's; keep the reference
//
// Layer: transfer. Thread-safe. To count is a few relaxed additions, and takes no lock.
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

#include "transfer/request.h"

namespace mk::transfer {

// Relaxed, for it orders nothing: several read together may be of slightly different moments.
class Counter {
 public:
  void operator+=(uint64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  void operator-=(uint64_t n) { value_.fetch_sub(n, std::memory_order_relaxed); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Bucket i counts what took less than 2^i microseconds and is in no bucket before it; the last one,
// whatever took longer than the others say (67 s).
constexpr size_t kNumLatencyBuckets = 28;
size_t latency_bucket(std::chrono::nanoseconds duration);

// Of requests. How many are over is the sum of the buckets.
struct RequestCounters {
  Counter num_bytes_read;  // confirmed bytes, also those of requests that failed later
  Counter num_bytes_written;
  Counter num_errors;  // requests that failed, were cancelled or ran out of time
  Counter num_in_flight;
  Counter num_bytes_in_flight;  // of all of such a request, until it is over
  Counter total_ns;             // that those which are over took
  std::array<Counter, kNumLatencyBuckets> latency;

  void add(const RequestCounters& other);
};

// Of one channel: a connection, or what goes by one NIC.
struct PathCounters {
  Counter num_bytes_read;
  Counter num_bytes_written;
  Counter num_pieces;      // of requests, that it has moved
  Counter num_retries;     // works that it lost, and that were then tried again
  Counter num_reconnects;  // times that it was connected, after the first
  Counter num_failures;    // times that it was lost, or could not be connected

  void add(const PathCounters& other);
};

class PeerCounters {
 public:
  RequestCounters requests;

  // The counters of that path, which stay where they are as long as this object lives.
  PathCounters& path(const std::string& name);
  std::map<std::string, const PathCounters*> paths() const;

  void add(const PeerCounters& other);

 private:
  mutable std::mutex mutex_;  // of the map, not of what is in it
  std::map<std::string, PathCounters> paths_;
};
using CountersRef = std::shared_ptr<PeerCounters>;

// A request that is counted: in flight until it is over, or until this object is gone.
class Counted {
 public:
  Counted(CountersRef counters, Direction direction, uint64_t num_bytes);
  Counted(const Counted&) = delete;
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
