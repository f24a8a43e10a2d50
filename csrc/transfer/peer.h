// Peer: another engine, as one engine sees it: a channel to it, and a worker thread that carries
// out requests one after the other, in the order in which they were submitted.
//
//   auto peer = std::make_shared<Peer>(name, std::move(channel), own_endpoint, stats);
//   peer->start(Deadline::after(5.0));             // connects
//   peer->wait_connected(Deadline::after(0.1));    // true once it has
//   TicketRef ticket = peer->submit(std::move(request), Deadline::after(30.0));
//
// Layer: transfer.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "transfer/channel.h"
#include "transfer/endpoint.h"
#include "transfer/stats.h"
#include "transfer/ticket.h"

namespace mk::transfer {

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  Peer(std::string name, std::unique_ptr<Channel> channel, std::shared_ptr<Endpoint> own,
       std::shared_ptr<Stats> stats);
  Peer(const Peer&) = delete;
  ~Peer() { close("the peer was closed"); }

  const std::string& name() const { return name_; }
  Transport transport() const { return transport_; }

  // Starts the worker, which connects. Throws TransferError if it was closed before.
  void start(const Deadline& deadline);

  // Whether it has connected, after waiting for that until `until`. Throws TransferError if it
  // could not.
  bool wait_connected(const Deadline& until);

  // Throws InvalidArgument once closed.
  TicketRef submit(Request request, const Deadline& deadline);

  // Ends one request, if it is still here; see Ticket::cancel.
  void abandon(const Ticket& ticket, const std::string& cause);

  // Fails what is pending with that cause, joins the worker and disconnects. Idempotent.
  void close(const std::string& cause);

 private:
  void work(const Deadline& deadline);
  bool connect(const Deadline& deadline);
  TicketRef next();
  void run(Ticket& ticket);
  void finish(Ticket& ticket, const std::string& cause, uint64_t num_bytes_done);

  const std::string name_;
  const Transport transport_;
  const std::unique_ptr<Channel> channel_;
  const std::shared_ptr<Endpoint> own_;
  const std::shared_ptr<Stats> stats_;

  // Signalled only for the request that is current_ (or to close): both change under the mutex,
  // and it is cleared when the next one becomes current.
  Interrupt interrupt_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TicketRef> queue_;
  const Ticket* current_ = nullptr;
  bool closing_ = false;
  std::optional<std::string> connected_;  // once tried: "", or why not

  std::mutex join_mutex_;
  std::thread worker_;
};
using PeerRef = std::shared_ptr<Peer>;

}  // namespace mk::transfer
