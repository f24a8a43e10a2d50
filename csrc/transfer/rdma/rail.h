// Rail: a path to a peer, from a NIC of ours to one of its.
//
//   Rail rail(nics[0], 0, counters);
//   rail.connect(ask_the_peer(rail.open()), /*peer's NIC*/ 1, gb_per_s);
//   if (rail.has_room()) rail.submit(slices, remote);  // the first of them
//   rail.collect(done);                                // finished slices
//   Slices left = rail.close();                        // what it had in flight
//
// Layer: transfer. One thread. Failures throw RailDown.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rdma/queue_pair.h"
#include "transfer/base/error.h"
#include "transfer/base/limit.h"
#include "transfer/memory/nics.h"
#include "transfer/rdma/slice.h"
#include "transfer/request/counters.h"
#include "transfer/wire/nic_wire.h"

namespace mk::transfer {

// A queue pair has failed, and nothing moves over it any more.
struct RailDown : std::runtime_error {
  RailDown(const std::string& reason, bool is_refused)
      : std::runtime_error(reason), is_refused(is_refused) {}
  bool is_refused;  // by the peer's NIC: our keys are not those of its regions
};

class Rail {
 public:
  using Clock = std::chrono::steady_clock;

  // `peer_nic`: the first one to try; `counters`: of all rails of that NIC of ours.
  Rail(const Nic& nic, size_t index, size_t peer_nic, PathCounters& counters)
      : nic_(nic), index_(index), counters_(counters), peer_nic_(peer_nic) {}

  // A new queue pair of our NIC; returns what the peer must know of it. Throws as the verbs.
  rdma::Endpoint open();
  void connect(const rdma::Endpoint& peer, size_t peer_nic, double peer_gb_per_s);
  // Ends the queue pair: when it returns, our NIC touches no memory for it. Idempotent.
  Slices close() noexcept;

  bool is_up() const { return is_up_; }
  size_t nic() const { return index_; }          // of ours
  size_t peer_nic() const { return peer_nic_; }  // the last one tried, or the first to try
  const rdma::CompletionQueue& queue() const { return *queue_; }

  // Estimated seconds until it has done that as well, from its past speed.
  double seconds_for(uint64_t num_bytes) const;
  bool has_room() const { return num_bytes_under_way_ < kRoomBytes; }
  // Takes the first of them.
  void submit(Slices& slices, const std::shared_ptr<const rdma::RemoteRegion>& remote);
  void collect(Slices& done);

  // A write is certain to be visible only when something sent after it has arrived.
  bool must_flush() const { return written_ != nullptr; }
  void flush();  // sends that something; done when is_flushed()
  bool is_flushed() const { return flush_token_ == 0; }
  // Whether there is something to collect; if not, queue().fds() signal when there is.
  bool arm() { return queue_->arm(); }
  // When collect() gives it up, unless something finishes before.
  Deadline patience() const { return is_busy() ? patience_ : Deadline::never(); }

  // After a failure: not retried for a while, each time longer, until it has moved something.
  void pause(const std::string& reason, size_t peer_nic);
  bool may_try() const { return Clock::now() >= try_at_; }
  // After a refusal instead, which other keys may mend: whether it needs no pause. The next one
  // does, unless it has moved something until then.
  bool forgive_refusal() { return !std::exchange(was_refused_, true); }
  const std::string& reason() const { return reason_; }  // why it is down; empty: no failure

 private:
  void post(const rdma::Transfer& transfer);
  void measure(double num_bytes, double seconds);
  bool is_stale() const;  // has had nothing to do for long
  bool is_busy() const { return !under_way_.empty() || flush_token_ != 0; }

  // With our settings, a NIC reports an unresponsive peer after two seconds at most. But soft-RoCE
  // sometimes reports nothing at all after its own port was down.
  static constexpr double kPatienceS = 5;
  // Enough to keep a fast link busy while we sleep; what is in flight cannot move to other rails.
  static constexpr uint64_t kRoomBytes = 4ull << 20;

  const Nic& nic_;
  const size_t index_;
  PathCounters& counters_;
  size_t peer_nic_;
  std::shared_ptr<rdma::CompletionQueue> queue_;
  std::shared_ptr<rdma::QueuePair> pair_;
  bool is_up_ = false, was_up_ = false, was_refused_ = false;

  Slices under_way_;
  rdma::Transfer transfer_;                    // of the last one; its buffers are kept
  std::vector<rdma::Completion> completions_;  // the same
  uint64_t last_token_ = 0;
  std::shared_ptr<const rdma::RemoteRegion> written_;  // by the last write since the last flush
  uint64_t flush_token_ = 0;                           // 0: none is in flight
  uint64_t num_bytes_under_way_ = 0;
  double link_bytes_per_s_ = 1;
  double measured_bytes_ = 0, measured_s_ = 0;  // since connected; the older, the less they count
  Clock::time_point busy_since_{};              // or since the last completion
  bool was_idle_ = true;                        // until then
  Deadline patience_;

  std::string reason_;
  double pause_s_ = 0;
  Clock::time_point try_at_{};
};

}  // namespace mk::transfer
