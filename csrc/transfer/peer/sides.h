// Sides: connections beside a peer's queue, for small requests of threads that find the queue
// occupied by those of others: threads that each make one request at a time do not have to hand one
// connection to each other, which takes two wake-ups a request.
//
//   if (sides.begin(ticket, max_piece_bytes)) return ticket;   // a caller
//   sides.wait_here(*ticket, until);                           // and received in its own thread
//
// Layer: transfer. Thread-safe. Each has a queue and a leading lane to itself, so that what becomes
// of a request is as in the peer's own: retries, deadlines, and the watch over what its caller does
// not wait for. A queue has one request at a time. They are made when they are missed, if the
// engine has not too many of them, connect if no other connection must be closed for that, and
// disconnect when they have not been used for some seconds.
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
#include "transfer/peer/beside.h"
#include "transfer/peer/job_queue.h"
#include "transfer/peer/lane.h"
#include "transfer/request/counters.h"

namespace mk::transfer {

class Sides {
 public:
  using MakeLane = std::function<std::unique_ptr<Lane>(JobQueue&, const Lanes&, size_t number)>;

  Sides(std::string peer_name, Beside& beside, ConnectionPool& pool, MakeLane make)
      : peer_name_(std::move(peer_name)), beside_(beside), pool_(pool), make_(std::move(make)) {}

  ~Sides();  // once it is closed

  // Whether this thread has made a request that is under way here.
  bool has_mine();

  // For a caller that has no other request to the peer under way. False: it must be pushed.
  bool begin(const TicketRef& ticket, uint64_t max_piece_bytes);

  // Of the side that has begun the ticket.
  void wait_here(const Ticket& ticket, const Deadline& until);
  void abandon(const Ticket& ticket, const Cause& cause);

  void interrupt(const Cause& cause);  // as Peer's
  void close(const Cause& cause);

 private:
  struct Side {
    Side(const std::string& peer_name, Beside& beside)
        : queue(peer_name, [&beside] { beside.leave(); }) {}
    Lane& lane() const { return *lanes.front(); }

    JobQueue queue;
    Lanes lanes;  // one
    std::thread thread;
  };
  static constexpr size_t kMaxSides = 3;  // more threads than this and one share the queue

  Side& of(const Ticket& ticket) const { return *sides_[ticket.side() - 1]; }
  void add();

  const std::string peer_name_;
  Beside& beside_;
  ConnectionPool& pool_;
  const MakeLane make_;
  std::unique_ptr<Side> sides_[kMaxSides];
  std::atomic<size_t> num_sides_{0};  // grows only
  std::mutex mutex_;                  // of what makes and closes them
  bool closed_ = false;
};

}  // namespace mk::transfer
