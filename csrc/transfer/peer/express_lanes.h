// ExpressLanes: auxiliary connections to a peer, for small requests of threads that find its queue
// occupied by those of others: threads that each make one request at a time do not have to hand one
// connection to each other, which takes two wake-ups a request.
//
//   if (express_lanes.begin(ticket, max_piece_bytes)) return ticket;   // a caller
//   express_lanes.drive(*ticket, until);                               // it receives, too
//
// Layer: transfer. Thread-safe. Each has a queue and a leading lane of its own, so that retries,
// deadlines, and the watch over what its caller does not wait for are those of the peer's queue. A
// queue has one request at a time. An express lane is created when one is missed, unless the engine
// has too many of them; connects if no other connection must be closed for that; and disconnects
// when it has not been used for some seconds.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transfer/memory/region_table.h"
#include "transfer/net/connection_pool.h"
#include "transfer/peer/inflight_fence.h"
#include "transfer/peer/job_queue.h"
#include "transfer/peer/lane.h"
#include "transfer/request/counters.h"

namespace mk::transfer {

class ExpressLanes {
 public:
  using MakeLane = std::function<std::unique_ptr<Lane>(JobQueue&, const Lanes&, size_t number)>;

  ExpressLanes(std::string peer_name, InflightFence& fence, ConnectionPool& pool, MakeLane make)
      : peer_name_(std::move(peer_name)), fence_(fence), pool_(pool), make_(std::move(make)) {}

  ~ExpressLanes();  // once it is closed

  // Whether this thread has made a request that is in flight here.
  bool has_mine();

  // For a caller that has no other request to the peer in flight. False: it must be pushed.
  bool begin(const TicketRef& ticket, uint64_t max_piece_bytes);

  // On the express lane that has begun the ticket.
  bool drive(const Ticket& ticket, const Deadline& until, bool polls);
  void abandon(const Ticket& ticket, const ErrorReason& reason);

  void interrupt(const ErrorReason& reason);  // as Peer's
  void close(const ErrorReason& reason);

 private:
  struct ExpressLane {
    ExpressLane(const std::string& peer_name, InflightFence& fence)
        : queue(peer_name, [&fence] { fence.leave(); }) {}
    Lane& lane() const { return *lanes.front(); }

    JobQueue queue;
    Lanes lanes;  // one
    std::thread thread;
  };
  static constexpr size_t kMaxLanes = 3;  // more threads than this and one share the queue

  ExpressLane& of(const Ticket& ticket) const { return *lanes_[ticket.express_lane() - 1]; }
  void add();

  const std::string peer_name_;
  InflightFence& fence_;
  ConnectionPool& pool_;
  const MakeLane make_;
  std::unique_ptr<ExpressLane> lanes_[kMaxLanes];
  std::atomic<size_t> num_lanes_{0};  // grows only
  std::mutex mutex_;                  // of what creates and closes them
  bool closed_ = false;
};

}  // namespace mk::transfer
