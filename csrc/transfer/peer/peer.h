// Peer: another engine, as one engine sees it: the channels to it, and the queue of requests to it.
//
//   auto peer = std::make_shared<Peer>(name, std::move(route), own_endpoint, pool, stats);
//   peer->start(Deadline::after(5.0));             // connects
//   peer->wait_connected(Deadline::after(0.1));    // true once it has
//   TicketRef ticket = peer->submit(std::move(request), Deadline::after(30.0));   // or null
//
// Layer: transfer.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transfer/net/endpoint.h"
#include "transfer/peer/caller_interrupts.h"
#include "transfer/peer/express_lanes.h"
#include "transfer/peer/job_queue.h"
#include "transfer/peer/lane.h"
#include "transfer/peer/route.h"
#include "transfer/peer/rpc_client.h"
#include "transfer/peer/stats.h"

namespace mk::transfer {

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  Peer(std::string name, Route route, std::shared_ptr<Endpoint> own,
       std::shared_ptr<ConnectionPool> pool, Stats& stats);
  Peer(const Peer&) = delete;
  ~Peer() { close({"the peer was closed", FailureKind::kClosed}); }

  const std::string& name() const { return name_; }
  Transport transport() const { return transport_; }
  const std::vector<std::string>& reasons() const { return reasons_; }
  const std::vector<std::string>& paths() const { return paths_; }  // of the channels

  // A channel like those it has, not connected; null: not available.
  std::unique_ptr<Channel> another_channel() const { return lanes_.front()->channel().another(); }

  // See Channel::trouble, of the leading lane's.
  std::string trouble() const { return lanes_.front()->channel().trouble(); }

  // Starts the leading lane, which connects. Throws TransferError if it was closed before, or
  // there is no thread to be had.
  void start(const Deadline& deadline);

  // Whether it has connected, after waiting for that until `until`. Throws TransferError if it
  // could not.
  bool wait_connected(const Deadline& until);

  // Whether submit() carries out short requests at once, in the calling thread.
  bool runs_in_caller() const { return lanes_.front()->channel().runs_in_caller() != nullptr; }

  // Null: it was carried out at once, in the calling thread, and is delivered. Throws
  // InvalidArgument once closed.
  TicketRef submit(Request request, const Deadline& deadline);

  // For a caller that waits for a ticket: continues what it has begun, or takes what was left to
  // it. `polls`: it does not wait, and looks again soon. Returns whether it is to call this then.
  bool drive(const Ticket& ticket, const Deadline& until, bool polls);

  // See rpc_client.h. Connects if necessary.
  std::unique_ptr<RpcResponse> call(const RpcRequest& request, const Deadline& deadline) {
    return rpc_client_->call(request, deadline);
  }

  // Ends one request, if it is still here; see Ticket::cancel.
  void abandon(const Ticket& ticket, const ErrorReason& reason) {
    ticket.express_lane() ? express_lanes_.abandon(ticket, reason) : queue_.abandon(ticket, reason);
  }

  // Fails pending requests, and connection attempts, with that reason.
  void interrupt(const ErrorReason& reason);

  // The same, joins the threads and disconnects. Idempotent.
  void close(const ErrorReason& reason);

 private:
  void lead(const Deadline& deadline);
  bool connect(const Deadline& deadline);
  // `confirmed`: of one that failed, as Job's.
  std::optional<Outcome> run_in_caller(Request& request, const Deadline& deadline,
                                       std::vector<Range>& confirmed);
  std::optional<Outcome> run(const Work& work, const Limit& limit);
  bool begin_in_caller(const TicketRef& ticket, uint64_t max_piece_bytes);
  void help(const Ticket& ticket, const Deadline& until);
  std::unique_ptr<Lane> make_express_lane(JobQueue& queue, const Lanes& alone, size_t number);
  void start_others();
  uint64_t max_piece_bytes(const Request& request) const;

  const std::string name_;
  const Transport transport_;
  const std::vector<std::string> reasons_;
  const std::shared_ptr<Endpoint> own_;
  const std::shared_ptr<ConnectionPool> pool_;
  const CountersRef counters_;
  JobQueue queue_;
  Lanes lanes_;
  InflightFence fence_;
  ExpressLanes express_lanes_;
  std::vector<std::string> paths_;
  const std::shared_ptr<RpcClient> rpc_client_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<ErrorReason> connected_;  // once tried: empty, or why not

  CallerInterrupts caller_interrupts_;  // of what is carried out in callers' threads

  std::mutex threads_mutex_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};
using PeerRef = std::shared_ptr<Peer>;

}  // namespace mk::transfer
