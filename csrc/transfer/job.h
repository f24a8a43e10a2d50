// Job: a request as it is carried out: what of it was handed out to channels, and what came back.
//
// Layer: transfer. Belongs to a JobQueue, whose mutex guards it. A request of several pieces is
// checked whole before its first byte moves, so that one refused for a range has changed nothing;
// the notification is handed out when all else is confirmed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transfer/channel.h"
#include "transfer/ticket.h"

namespace mk::transfer {

// The leading lane takes whatever there is; another lane, of what spreads; who waits for a request,
// data.
enum class Taker { kLead, kBeside, kWaiter };

enum class Retry { kNo, kCounted, kFree };  // counted: it is the work's share of bad luck

class Job {
 public:
  // Cut into pieces of at most `max_bytes`.
  Job(TicketRef ticket, uint64_t id, uint64_t max_bytes);

  const TicketRef& ticket() const { return ticket_; }
  const Request& request() const { return request_; }
  uint64_t max_bytes() const { return max_bytes_; }
  bool has_pieces() const { return has_pieces_; }  // more than one
  // Whether other lanes than the leading one may take of it.
  bool spreads() const { return spreads_; }
  // Whether what comes behind it on the leading lane arrives after it.
  bool in_order() const { return !has_pieces_ && !beside_; }

  // The next work, if there is any to do now; `carrier` is who will do it. Works that are tried
  // again come first. `may_notify`: nothing before it has to be confirmed first.
  bool take(Work& work, Interrupt& carrier, Taker taker, bool may_notify);

  // What has come of a work: exactly one of these, for each that was taken.
  void finish(const Work& work, const Interrupt& carrier, const Outcome& outcome);
  // `num_bytes`: confirmed, and not to be counted if all of it is tried again.
  void fail(const Work& work, const Interrupt& carrier, const std::string& cause, Retry retry,
            uint64_t num_bytes);

  // Ends it: nothing more is handed out, and whoever carries some of it is interrupted.
  void stop(const std::string& cause);

  bool over() const;                                   // nothing is under way, and nothing will be
  const std::string& cause() const { return cause_; }  // why it failed; "" if it did not
  // By the peer, before anything moved.
  bool refused_whole() const { return refused_ && num_bytes_done_ == 0; }
  uint64_t num_bytes_done() const { return num_bytes_done_; }

 private:
  void try_again(const Work& work, const std::string& cause, Retry retry);
  bool has_data() const;
  bool take_again(Work& work);
  void release(const Interrupt& carrier);

  const TicketRef ticket_;
  const Request& request_;  // the ticket's
  const uint64_t id_;
  const uint64_t max_bytes_;
  Cutter cutter_;
  bool has_pieces_;
  bool spreads_;
  bool beside_ = false;  // somebody else than the leading lane has had it
  bool checked_, check_taken_ = false;
  bool notified_, notify_taken_ = false;
  bool notify_begun_ = false;  // the peer may have it; set by whoever carries it
  std::vector<Work> again_;
  std::string lost_;                  // why the first of these was to be tried again
  std::vector<Interrupt*> carriers_;  // one entry a work that is under way
  uint64_t num_bytes_done_ = 0;
  std::string cause_;
  bool refused_ = false;
};
using JobRef = std::shared_ptr<Job>;

}  // namespace mk::transfer
