// The two ways in which a calling thread, rather than a lane's, may carry a request out over a
// channel. A channel that offers one of them implements it, and says so by Channel::caller_driven()
// or Channel::runs_in_caller().
//
//   if (driven->may_drive(request) && driven->can_drive(request)) {
//     channel.post(work, limit);                    // does not wait
//     poll driven->ready_fd(); if (driven->is_ready()) channel.finish(limit);   // nor does this
//   }
//   if (const auto outcome = runs->run(work, limit)) return *outcome;
//
// Layer: transfer.
#pragma once

#include <chrono>
#include <optional>

#include "transfer/channel/channel.h"

namespace mk::transfer {

// The caller posts a request, and makes its progress while it waits.
class CallerDriven {
 public:
  // Whether a caller may ever post such a request; any thread.
  virtual bool may_drive(const Request&) const = 0;

  // If so: whether post() of it does not wait now. One thread at a time, and so the rest.
  virtual bool can_drive(const Request&) const = 0;

  // The caller then waits, as long as it likes, until this is readable, and if is_ready(), calls
  // finish(), which does not wait either.
  virtual int ready_fd() const = 0;
  virtual bool is_ready() const = 0;

  // From now on ready_fd() is readable only once all of the response is there, or there is no room
  // for more; false: what has come may be all of it already. End it by wait_for_any(), before
  // finish().
  virtual bool wait_for_all() = 0;
  virtual void wait_for_any() = 0;

  // How long to poll before a wait sleeps.
  virtual std::chrono::microseconds spin() const = 0;

 protected:
  ~CallerDriven() = default;
};

// Any thread may carry out short works at once, in parallel with posted ones.
class RunsInCaller {
 public:
  // Nothing: it was not done, and must be posted.
  virtual std::optional<Outcome> run(const Work&, const Limit&) = 0;

  // Whether run() copies by plain loads and stores, which one thread does as fast as two as long as
  // the bytes are in a cache, and wakes no one.
  virtual bool maps_memory() const = 0;

 protected:
  ~RunsInCaller() = default;
};

}  // namespace mk::transfer
