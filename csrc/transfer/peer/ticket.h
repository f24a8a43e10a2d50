// Ticket: a request in flight, and how it ended.
//
//   TicketRef ticket = peer->submit(std::move(request), Deadline::after(30.0));
//   if (!ticket) return;                                       // it is delivered
//   if (ticket->wait(Deadline::after(1.0))) ticket->check();   // throws TransferError
//
// Layer: transfer. Thread-safe. Dropping a ticket does not cancel it. In a forked child, which has
// no worker, calls that would read or change the request throw InvalidArgument.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/owner.h"
#include "transfer/base/limit.h"
#include "transfer/peer/completions.h"
#include "transfer/request/coalesce.h"
#include "transfer/request/counters.h"
#include "transfer/request/request.h"

namespace mk::transfer {

class Peer;

class Ticket {
 public:
  Ticket(std::weak_ptr<Peer> peer, std::string peer_name, Request request, const Deadline& deadline,
         Counted counted);

  const Request& request() const { return request_; }  // until it is finished
  bool split_request() { return split(request_); }     // while no part of it is being carried out
  uint64_t num_bytes() const { return num_bytes_; }
  const Deadline& deadline() const { return deadline_; }
  std::thread::id maker() const { return maker_; }  // the thread that has made it

  // Whether nothing more will happen: delivered, failed or cancelled.
  bool finished();

  bool is_over();  // the same, without checking on work in flight

  // Returns finished(), after waiting until `until` or the request's own deadline. Past its own
  // deadline it is finished.
  bool wait(const Deadline& until);

  // Throws TransferError unless everything was delivered. Call it once finished.
  void check() const;

  // When it finished, in seconds of the monotonic clock; none while it is not finished.
  std::optional<double> ended_s() const;

  // Ends the request unless it is finished. When it returns, local memory is no longer touched.
  // Returns whether it was ended so, by this call or an earlier one.
  bool cancel();

  // Pushes the key into the queue when finished, or now if it already is.
  void push_when_finished(std::shared_ptr<CompletionQueue> queue, uint64_t key);

  // Its caller has begun it in its own thread, or may do so when it waits. Call it before others
  // have the ticket.
  void leave_to_caller() { is_with_caller_ = true; }

  // Which of the peer's express lanes carries it, counted from 1; 0: none. As leave_to_caller().
  void set_express_lane(size_t number) { express_lane_ = number; }
  size_t express_lane() const { return express_lane_; }

  // Ends it, once; "" means delivered. `confirmed`: see Job.
  void finish(const ErrorReason& reason, uint64_t num_bytes_done,
              const std::vector<Range>& confirmed);

 private:
  bool wait_until(const Deadline& until, bool polls);
  void drive(const Deadline& until, bool polls);
  void abandon(const ErrorReason& reason);
  void wait_finished();

  const Owner owner_;
  const std::weak_ptr<Peer> peer_;
  const std::string peer_name_;
  const uint64_t num_bytes_;
  const Deadline deadline_;
  const std::thread::id maker_ = std::this_thread::get_id();
  Request request_;
  size_t express_lane_ = 0;
  std::atomic<bool> is_with_caller_{false};
  Counted counted_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool finished_ = false;
  std::chrono::steady_clock::time_point ended_at_;
  ErrorReason reason_;
  uint64_t num_bytes_done_ = 0;
  // Of a request that failed:
  std::vector<bool> delivered_;
  bool only_notification_missing_ = false;
  std::vector<std::pair<std::shared_ptr<CompletionQueue>, uint64_t>> completions_;
};
using TicketRef = std::shared_ptr<Ticket>;

}  // namespace mk::transfer
