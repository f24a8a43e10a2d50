// Job: a request in execution: which parts of it were handed out to channels, and their results.
//
// Layer: transfer. Belongs to a JobQueue, whose mutex guards it. A request of several pieces is
// checked as a whole before its first byte moves, so that a refusal changes nothing; the
// notification is handed out once everything else is confirmed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/channel/channel.h"
#include "transfer/peer/inflight_fence.h"
#include "transfer/peer/ticket.h"

namespace mk::transfer {

// The leading lane takes any work; another lane takes work that spreads; a caller that waits for a
// request takes data, and the check before it.
enum class Taker { kLead, kFollower, kWaiter };

enum class Retry { kNo, kCounted, kFree };  // counted: it uses up the work's retries

class Job {
 public:
  // Cut into pieces of at most `max_bytes`.
  Job(TicketRef ticket, uint64_t id, uint64_t max_bytes);

  const TicketRef& ticket() const { return ticket_; }
  const Request& request() const { return request_; }
  uint64_t id() const { return id_; }
  uint64_t max_bytes() const { return max_bytes_; }
  bool has_pieces() const { return has_pieces_; }  // more than one
  // Whether lanes other than the leading one may take part of it.
  bool spreads() const { return spreads_; }
  // Whether later requests on the leading lane arrive after it.
  bool in_order() const { return !has_pieces_ && !is_shared_; }

  // Before it is handed out: it begins after what is in flight outside the queue.
  void come_after(InflightFence& fence) { held_.emplace(fence); }
  // Whether it still has to.
  bool held() {
    if (held_ && held_->is_over()) held_.reset();
    return held_.has_value();
  }

  // The next work, if there is any to do now; `carrier` is the interrupt of the taker. Retried
  // works come first. `may_notify`: nothing before it must be confirmed first.
  bool take(Work& work, Interrupt& carrier, Taker taker, bool may_notify);

  // The result of a work: exactly one of these for each that was taken.
  void finish(const Work& work, const Interrupt& carrier, const Outcome& outcome);
  // `num_bytes`: confirmed; not counted if all of it is retried.
  void fail(const Work& work, const Interrupt& carrier, const ErrorReason& reason, Retry retry,
            uint64_t num_bytes);

  // Ends it: nothing more is handed out, and the carriers of its works are interrupted.
  void stop(const ErrorReason& reason);
  // The same on behalf of its caller.
  void abandon(const ErrorReason& reason);

  bool over() const;  // nothing is in flight, and nothing will be
  const ErrorReason& reason() const { return reason_; }  // why it failed; "" if it did not
  // Whether the peer refused it before anything moved, and its caller has not given it up.
  bool refused_whole() const { return refused_ && !abandoned_ && num_bytes_done_ == 0; }
  uint64_t num_bytes_done() const { return num_bytes_done_; }
  // Once it has failed: the pieces that have arrived, as ranges of the request's bytes.
  const std::vector<Range>& confirmed() const { return confirmed_; }

 private:
  void try_again(const Work& work, const ErrorReason& reason, Retry retry);
  bool has_data() const;
  bool take_again(Work& work);
  void release(const Interrupt& carrier);
  void confirm(const Work& work, uint64_t num_bytes, bool failed);

  const TicketRef ticket_;
  const Request& request_;  // the ticket's
  const uint64_t id_;
  const uint64_t max_bytes_;
  std::optional<InflightFence::Wait> held_;
  Cutter cutter_;
  bool has_pieces_;
  bool spreads_;
  bool is_shared_ = false;  // a lane other than the leading one has taken from it
  bool checked_, check_taken_ = false;
  bool notified_, notify_taken_ = false;
  bool notify_begun_ = false;  // the peer may have it; set by the carrier
  std::vector<Work> again_;
  ErrorReason lost_;                  // why the first of these has to be retried
  std::vector<Interrupt*> carriers_;  // one entry per work in flight
  uint64_t num_bytes_done_ = 0;
  std::vector<Range> confirmed_;  // neighbours are merged
  ErrorReason reason_;
  bool refused_ = false;
  bool abandoned_ = false;
};
using JobRef = std::shared_ptr<Job>;

}  // namespace mk::transfer
