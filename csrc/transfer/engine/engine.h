// Engine: registers memory, listens to peers, and writes to and reads from theirs.
//
//   Engine engine({"prefill-3", "127.0.0.1:0", /*local=*/true, /*shm=*/true, /*cuda_ipc=*/true,
//                  /*tcp=*/true, /*file=*/true, /*nics=*/{}, /*near_nics=*/{},
//                  /*nics_required=*/false, /*num_lanes=*/2, /*max_connections=*/512,
//                  /*spin=*/{}, /*credentials=*/{}, /*reached_at=*/{}});
//   RegionRef region = engine.add_region({address, num_bytes}, kRemoteWrite, /*device=*/-1);
//   PeerRef peer = engine.open({"decode-1", "10.0.0.2:4711", instance}, 30.0);
//   peer->wait_connected(Deadline::after(30.0));
//   TicketRef ticket = engine.submit(*peer, std::move(request), 30.0);   // or null, see there
//
// Layer: transfer. Thread-safe. Python face: mooncake_kernels/transfer.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/owner.h"
#include "transfer/engine/explain.h"
#include "transfer/net/endpoint.h"
#include "transfer/net/lost_links.h"
#include "transfer/peer/engine_options.h"
#include "transfer/peer/peer.h"
#include "transfer/peer/route.h"
#include "transfer/peer/stats.h"
#include "transfer/server/server.h"

namespace mk::transfer {

class Engine {
 public:
  // Throws InvalidArgument (name, listen), Unavailable (host not found), SystemError (port taken).
  explicit Engine(const EngineOptions& options);
  Engine(const Engine&) = delete;
  ~Engine() { close(); }

  const std::string& name() const { return own_->name; }
  const std::string& address() const { return own_->address; }
  uint64_t instance() const { return own_->instance; }
  const std::vector<std::string>& missing_nics() const { return own_->nics->missing(); }

  // `device`: the GPU that holds the memory; -1: the host. Throws InvalidArgument, Unavailable (no
  // driver), and as rdma::register_memory, if NICs are required.
  RegionRef add_region(const Range& range, Rights rights, int device);
  bool remove_region(const RegionRef& region);                         // see RegionTable::remove
  RegionRef open_window(const RegionRef& region, const Range& range);  // see RegionTable
  void close_window(const RegionRef& window);

  // Begins to connect by the transport that find_route finds; see Peer::wait_connected. Throws as
  // find_route.
  PeerRef open(const PeerAddress& to, double deadline_s);
  // Likewise, a file: `place` is "file:" and its path, mostly also its name. Throws as file_route.
  PeerRef open_file(const std::string& name, const std::string& place, double deadline_s);
  void close_peer(const PeerRef& peer);

  // See prepare.h. Null: it is delivered already. Throws InvalidArgument, also for a closed peer.
  TicketRef submit(Peer& peer, Request request, double deadline_s);

  // What submit() does before peer.submit(), which may then follow later.
  void prepare(const Peer& peer, Request& request) const;

  // Whether NICs move all that requests to that peer ask for.
  bool uses_only_nics(const Peer& peer) const {
    return peer.transport() == Transport::kRdma && !options_.tcp;
  }

  // Makes all earlier submitted writes to a file survive a loss of power.
  TicketRef sync(Peer& peer, double deadline_s);

  // See explain.h. The peer must be open.
  Explanation explain_path(const Peer& peer, const Range& local, const Range& remote,
                           double deadline_s) const;
  std::vector<RegionTable::Listed> list_regions(const Peer& peer, double deadline_s) const;

  // Handles the calls of peers from now on; null: refuses them.
  void serve(std::shared_ptr<Service> service);
  void stop_serving(const Service& service);  // no effect if it serves another one by now

  // Calls a peer's service; see rpc_client.h. Throws TransferError, Unavailable.
  std::unique_ptr<RpcResponse> call(Peer& peer, const RpcRequest& request,
                                    const Deadline& deadline) const;

  std::vector<Notification> take_notifications(const Deadline& deadline);
  void accept_notifications();                       // again, after refuse_notifications()
  std::vector<Notification> refuse_notifications();  // see NotificationQueue
  std::vector<Stats::Row> stats() const;
  Rejections::Table rejections() const;  // of peers that connected here

  // Fails pending requests, closes peers, stops listening, removes every region. Idempotent; a
  // second thread that closes waits for the first. False: as in RegionTable::close.
  bool close();

  // In a forked child the engine's threads do not exist, and its peers belong to the parent:
  // remove_region, close_peer and close do nothing there, the others throw InvalidArgument, and it
  // must not be destroyed.
  bool forked() const { return owner_.forked(); }
  void check_process(const char* op) const { owner_.check(op, "engine"); }

 private:
  void start_server();
  PeerRef start_peer(const std::string& name, Route route, const Deadline& deadline);

  const EngineOptions options_;
  const Owner owner_;
  const std::shared_ptr<Stats> stats_ = std::make_shared<Stats>();
  const std::shared_ptr<ConnectionPool> pool_;
  const std::shared_ptr<LostLinksTable> lost_links_ = std::make_shared<LostLinksTable>();
  Fd bound_;  // holds the port, hence the name, of an engine that does not listen
  std::shared_ptr<Endpoint> own_;
  std::unique_ptr<Server> server_;
  std::mutex close_mutex_;
  bool all_removed_ = true;

  std::mutex mutex_;
  std::vector<PeerRef> peers_;
  bool closed_ = false;
};

}  // namespace mk::transfer
