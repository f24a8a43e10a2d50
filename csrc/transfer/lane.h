// Lane: a channel, and the thread that works on it: takes tasks from a queue, as many as the
// channel has room for, and tells the queue what came of them.
//
// Layer: transfer. The leading lane is the first to connect, and connects anew for what it has
// taken; the others connect before they take something, so that they hold nothing up.
#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <thread>

#include "transfer/channel.h"
#include "transfer/counters.h"
#include "transfer/job_queue.h"
#include "transfer/region_table.h"

namespace mk::transfer {

class Lane {
 public:
  Lane(std::unique_ptr<Channel> channel, JobQueue& queue, RegionTable& own_regions, bool leads,
       PathCounters& counters)
      : channel_(std::move(channel)),
        queue_(queue),
        own_regions_(own_regions),
        leads_(leads),
        counters_(counters) {}

  Channel& channel() { return *channel_; }
  Interrupt& interrupt() { return interrupt_; }

  void connect(const Limit& limit);  // as the channel's
  void run();                        // until the queue is closed

  // What came of a work, and why the channel was lost, unless somebody's limit has ended it.
  void count(const Work& work, const Outcome& outcome);
  void count_failure(const std::exception& error);

 private:
  struct Posted {
    Posted(Task task, RegionTable& regions, Interrupt& interrupt)
        : task(std::move(task)), pin(regions.pin(this->task.job->request().regions, interrupt)) {}
    Task task;
    Pin pin;
  };

  bool connect_beside();
  void begin(const Task& task);
  void settle();
  void lose(const std::exception& error);
  void fail(const Task& task, const std::string& cause, Retry retry);
  Limit limit_of(const Task& task) const;

  const std::unique_ptr<Channel> channel_;
  JobQueue& queue_;
  RegionTable& own_regions_;
  const bool leads_;
  PathCounters& counters_;
  bool was_connected_ = false;
  Interrupt interrupt_;
  std::deque<Posted> posted_;
};

}  // namespace mk::transfer
