// Lane: a channel and the thread that works on it: it takes tasks from a queue, as many as the
// channel has room for, and reports their results to the queue.
//
//   lane.run();                               // its thread
//   if (lane.begin_in_caller(ticket, most))   // a caller: begun, if the lane was idle
//     lane.drive(*ticket, until);             // and received in its own thread, if it waits
//
// Layer: transfer. The leading lane is the first to connect, and reconnects for tasks it has taken;
// the others connect before they take a task, so that they delay nothing. The holder of the
// progress lock drives: a small request to an idle lane needs no thread but its caller's. If the
// caller does not wait for it, or not long enough, the lane's thread takes over.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "transfer/channel/caller_driven.h"
#include "transfer/channel/channel.h"
#include "transfer/memory/region_table.h"
#include "transfer/net/connection_pool.h"
#include "transfer/peer/job_queue.h"
#include "transfer/peer/progress_lock.h"
#include "transfer/request/counters.h"

namespace mk::transfer {

class Lane;
using Lanes = std::vector<std::unique_ptr<Lane>>;

class Lane final : public Connected {
 public:
  // The first of `lanes`, which are all of that peer's, leads; it disconnects when there was
  // nothing to do for `idle`.
  Lane(std::unique_ptr<Channel> channel, JobQueue& queue, RegionTable& own_regions,
       ConnectionPool& pool, const Lanes& lanes, PathCounters& counters,
       std::optional<std::chrono::seconds> idle = {})
      : channel_(std::move(channel)),
        queue_(queue),
        own_regions_(own_regions),
        pool_(pool),
        lanes_(lanes),
        driven_(channel_->caller_driven()),
        leads_(lanes.empty()),
        counters_(counters),
        idle_(idle) {}

  Channel& channel() { return *channel_; }
  Interrupt& interrupt() { return interrupt_; }

  void connect(const Limit& limit);  // as the channel's
  void run();                        // until the queue is closed
  void close();                      // permanently, once it does not run

  // Of a leading lane whose channel is CallerDriven. False: the request must be pushed.
  bool begin_in_caller(const TicketRef& ticket, uint64_t max_piece_bytes);
  // Has its thread connect, unless it is connected, in use, or could not a moment ago, or that
  // would cost another its connection.
  void connect_soon();
  // Until it has ended, or `until`, or another thread continues it. Returns whether none does yet:
  // `polls`, its caller looks again, or the lane's thread does in a moment.
  bool drive(const Ticket& ticket, const Deadline& until, bool polls);

  bool try_disconnect() override;

  // Counts a work's result, and why the channel was lost, unless a limit ended it.
  void count(const Work& work, const Outcome& outcome);
  void count_failure(const std::exception& error);

 private:
  struct Posted {
    Posted(Task task, RegionTable& regions, Interrupt& interrupt)
        : task(std::move(task)), pin(regions.pin(this->task.job->request().regions, interrupt)) {}
    Task task;
    Pin pin;
  };

  // What follows requires the progress lock.
  void connect_held(const Limit& limit);
  bool try_connect();
  void disconnect();
  void leave_if_lost();  // of a non-leading lane; as try_disconnect(), if the peer has left
  void run_dry();
  void begin(const Task& task, bool connects = true);
  void wait_for_gpu(const Task& task);  // to have done what the request comes after
  void settle();
  void lose(const std::exception& error, const Posted* culprit = nullptr);
  void fail(const Task& task, const ErrorReason& reason, Retry retry, uint64_t num_bytes = 0);
  Limit limit_of(const Task& task);
  bool wait_ready(const Deadline& until);
  bool wait_ready(const Deadline& until, bool& for_all);
  void count_bytes(bool written, uint64_t num_bytes);

  void lead();
  void run_follower();
  bool connect_follower();

  const std::unique_ptr<Channel> channel_;
  JobQueue& queue_;
  RegionTable& own_regions_;
  ConnectionPool& pool_;
  const Lanes& lanes_;          // itself included
  CallerDriven* const driven_;  // null: only its own thread drives it
  const bool leads_;
  PathCounters& counters_;
  const std::optional<std::chrono::seconds> idle_;
  ProgressLock progress_lock_;
  bool was_connected_ = false;
  std::atomic<bool> shall_connect_{false};
  Deadline pause_ = Deadline::after(0);  // after a failure
  Interrupt interrupt_;
  std::deque<Posted> posted_;
};

}  // namespace mk::transfer
