#include "transfer/request/counters.h"

#include <algorithm>
#include <utility>

namespace mk::transfer {

size_t latency_bucket(std::chrono::nanoseconds duration) {
  const uint64_t us = std::max<int64_t>(duration.count(), 0) / 1000;
  const size_t num_bits = us == 0 ? 0 : 64 - __builtin_clzll(us);
  return std::min(num_bits, kNumLatencyBuckets - 1);
}

void RequestCounters::add(const RequestCounters& other) {
  num_bytes_read += other.num_bytes_read.get();
  num_bytes_written += other.num_bytes_written.get();
  num_errors += other.num_errors.get();
  num_in_flight += other.num_in_flight.get();
  num_bytes_in_flight += other.num_bytes_in_flight.get();
  total_ns += other.total_ns.get();
  for (size_t i = 0; i < latency.size(); ++i) latency[i] += other.latency[i].get();
}

void PathCounters::add(const PathCounters& other) {
  num_bytes_read += other.num_bytes_read.get();
  num_bytes_written += other.num_bytes_written.get();
  num_pieces += other.num_pieces.get();
  num_retries += other.num_retries.get();
  num_reconnects += other.num_reconnects.get();
  num_failures += other.num_failures.get();
}

PathCounters& PeerCounters::path(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return paths_[name];
}

std::map<std::string, const PathCounters*> PeerCounters::paths() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, const PathCounters*> paths;
  for (const auto& [name, counters] : paths_) paths.emplace(name, &counters);
  return paths;
}

void PeerCounters::add(const PeerCounters& other) {
  requests.add(other.requests);
  for (const auto& [name, counters] : other.paths()) path(name).add(*counters);
}

Counted::Counted(CountersRef counters, Direction direction, uint64_t num_bytes)
    : counters_(std::move(counters)), direction_(direction), num_bytes_(num_bytes) {
  counters_->requests.num_in_flight += 1;
  counters_->requests.num_bytes_in_flight += num_bytes_;
}

void Counted::end(uint64_t num_bytes_done, bool failed) {
  RequestCounters& requests = counters_->requests;
  const bool reads = direction_ == Direction::kRead;
  (reads ? requests.num_bytes_read : requests.num_bytes_written) += num_bytes_done;
  if (failed) requests.num_errors += 1;
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin_;
  requests.total_ns += took.count();
  requests.latency[latency_bucket(took)] += 1;
  leave();
}

void Counted::leave() {
  if (!counters_) return;
  counters_->requests.num_in_flight -= 1;
  counters_->requests.num_bytes_in_flight -= num_bytes_;
  counters_.reset();
}

}  // namespace mk::transfer
