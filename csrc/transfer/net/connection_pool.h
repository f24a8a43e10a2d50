// ConnectionPool: limits how many connections an engine keeps to all of its peers. A new one closes
// an idle one, chosen by SIEVE, whose lane reconnects when it has something to do.
//
//   pool.enter(lane, limit);   // before it connects; waits while all others are in use
//   lane.visited = true;       // it is used
//   pool.leave(lane);          // it is disconnected
//   if (pool.add_side()) ... pool.remove_side();   // see sides.h
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
  // No more entries: current and later calls of enter() throw Ended with the cause.
  void close(const Cause& cause);
  size_t size() const;

  // Connections beside queues, each of which has a thread and descriptors also while it is not
  // connected. False: there are enough.
  bool add_side();
  void remove_side() { --num_sides_; }

 private:
  void check(const Limit& limit) const;
  bool has_room();

  static constexpr size_t kMaxSides = 32;

  const size_t max_connections_;
  std::atomic<size_t> num_sides_{0};
  mutable std::mutex mutex_;
  std::condition_variable left_;
  Sieve<Connected> sieve_;
  Cause closed_;  // why; empty while it is not
};

}  // namespace mk::transfer
