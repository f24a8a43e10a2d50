// ConnectionPool: limits how many connections an engine keeps to all of its peers. A new one closes
// an idle one, chosen by SIEVE, whose lane reconnects when it has something to do.
//
//   pool.enter(lane, limit);   // before it connects; waits while all others are in use
//   lane.visited = true;       // it is used
//   pool.leave(lane);          // it is disconnected
//   if (pool.add_express_lane()) ... pool.remove_express_lane();   // see express_lanes.h
//
// Layer: transfer. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>

#include "common/sieve.h"
#include "transfer/base/limit.h"

namespace mk::transfer {

// An owner of a connection.
class Connected : public SieveEntry {
 public:
  // Disconnects unless in use; may wait for nothing else. Called under the pool's lock.
  virtual bool try_disconnect() = 0;

 protected:
  ~Connected() = default;

 private:
  friend class ConnectionPool;
  bool is_in_pool_ = false;
};

class ConnectionPool {
 public:
  explicit ConnectionPool(size_t max_connections) : max_connections_(max_connections) {}

  // Throws Failure at the limit.
  void enter(Connected& member, const Limit& limit);
  // Whether there is room without another connection being closed; then it has entered.
  bool try_enter(Connected& member);
  void leave(Connected& member);  // idempotent
  // No more entries: current and later calls of enter() throw Ended with the reason.
  void close(const ErrorReason& reason);
  size_t size() const;

  // Express lanes, each of which has a thread and descriptors also while it is not connected.
  // False: there are enough.
  bool add_express_lane();
  void remove_express_lane() { --num_express_lanes_; }

 private:
  void check(const Limit& limit) const;
  bool has_room();

  static constexpr size_t kMaxExpressLanes = 32;

  const size_t max_connections_;
  std::atomic<size_t> num_express_lanes_{0};
  mutable std::mutex mutex_;
  std::condition_variable left_;
  Sieve<Connected> sieve_;
  ErrorReason closed_;  // why; empty while it is not
};

}  // namespace mk::transfer
