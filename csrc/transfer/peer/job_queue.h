// JobQueue: the requests to one peer, in order, and which lanes carry out which parts of them.
//
//   queue.push(ticket, max_piece_bytes, defer);          // a caller
//   while (queue.wait_to_lead({}) == kForWork) {         // the leading lane
//     while (queue.next(true, carrier, idle, task)) ...  // takes, then finish() or fail()
//   }
//
// Layer: transfer. Thread-safe. Lanes take works as they have room for them, so that a fast one
// does more of a request than a slow one. Requests of one piece begin in order, on the leading
// lane; except that other lanes help with large ones if there are several, and that a caller that
// waits for the first request of its thread may carry it out, or parts of it. A notification comes
// after the data of all earlier requests.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "transfer/peer/job.h"

namespace mk::transfer {

struct Task {
  JobRef job;
  Work work;
};

class JobQueue {
 public:
  // `when_over` is called for each request that is over, before its ticket tells.
  explicit JobQueue(std::string peer_name, std::function<void()> when_over = {})
      : peer_name_(std::move(peer_name)), when_over_(std::move(when_over)) {}

  // Returns whether there is work for lanes other than the leading one. `defer`: its caller will
  // wait for it and may take it in a moment, so no lane is woken if it is of one piece and the only
  // one of its thread. `after`: it, and what is pushed later, does not begin before what is under
  // way there is over; wake_all() then. Throws InvalidArgument once closed.
  bool push(TicketRef ticket, uint64_t max_piece_bytes, bool defer, InflightFence* after = nullptr);
  bool idle();      // nothing is queued or in flight
  bool may_rest();  // the same, or nothing can begin before what is in flight outside it is over
  bool has_mine();  // whether this thread has made any of it, or there is too much to tell
  bool has_only_others();  // whether there are some, and all were made by other threads

  // For a caller that drives the leading lane, which has nothing in flight: returns its task at
  // once. False: another request is before it, or closed.
  bool push_and_take(const TicketRef& ticket, uint64_t max_piece_bytes, Interrupt& carrier,
                     Task& task);

  // Sleeps until there may be work for the leading lane's thread, or a request that a caller has
  // begun, or may take, was abandoned by it; or until nothing was queued for so long.
  enum class Woken { kClosed, kForWork, kIdle };
  Woken wait_to_lead(std::optional<std::chrono::seconds> idle);
  void wake_lead();
  void wake_all();  // other lanes, too

  // For a caller that waits for a request, and has nothing in flight: takes all of it, if it is of
  // one piece, the first of its thread, and not yet taken; with `pieces`, if it is the first of
  // all, the next one of several, too.
  bool take_own(const Ticket& ticket, bool pieces, Interrupt& carrier, Task& task);

  // The next task for a lane, whose interrupt is `carrier`; `leads`: it is the leading lane;
  // `idle`: it has nothing in flight. False: none now, or closed.
  bool next(bool leads, Interrupt& carrier, bool idle, Task& task);
  // The same for an idle lane other than the leading one, which waits. False: closed.
  bool wait_next(Interrupt& carrier, Task& task);
  void finish(const Task& task, const Interrupt& carrier, const Outcome& outcome);
  // Returns whether it will be handed out again. `num_bytes`: see Job::fail; if it counts them,
  // `count` is called before anyone learns that the request is over.
  bool fail(const Task& task, const Interrupt& carrier, const ErrorReason& reason, Retry retry,
            uint64_t num_bytes = 0, const std::function<void()>& count = {});

  // Waits until there is work for a lane other than the leading one. False: closed.
  bool wait_for_pieces(Interrupt& carrier);
  // Ends one request, if it is still here; see Ticket::cancel.
  void abandon(const Ticket& ticket, const ErrorReason& reason);

  // Ends all, and releases the lanes. Idempotent.
  void close(const ErrorReason& reason);

  // Sleeps; returns early once closed.
  void pause(double seconds);

 private:
  bool take(Taker taker, Interrupt& carrier, Task& task);
  bool has_of(std::thread::id maker) const;
  void changed(const JobRef& job, std::unique_lock<std::mutex>& lock);
  bool concerns_others(const Job& job) const;
  void wake_lead_locked();
  void watch();

  const std::string peer_name_;
  const std::function<void()> when_over_;

  std::mutex mutex_;
  std::condition_variable lead_, others_;  // others_: whom one-piece requests do not concern
  std::deque<JobRef> jobs_;
  uint64_t num_pushed_ = 0;
  bool lead_woken_ = false;
  bool watches_ = false;  // the leading lane's thread checks from time to time
  bool closed_ = false;
};

}  // namespace mk::transfer
