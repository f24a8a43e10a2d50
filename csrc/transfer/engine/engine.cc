#include "transfer/engine/engine.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "common/check.h"
#include "rdma/gpu_memory.h"
#include "transfer/base/error.h"
#include "transfer/base/random.h"
#include "transfer/gpu/gpu_stream.h"
#include "transfer/net/address.h"
#include "transfer/request/prepare.h"

namespace mk::transfer {
namespace {

void check_gpu_memory(const Range& range, int device) {
  if (const std::string missing = missing_gpu_driver(); !missing.empty()) {
    throw Unavailable(concat("register: memory of cuda:", device, ": ", missing));
  }
  const auto found = rdma::find_gpu_memory({range.address, range.num_bytes});
  MK_CHECK(found && found->device == device, "register: buffer must be memory of cuda:", device,
           ", got memory of ", found ? concat("cuda:", found->device) : "the host");
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options), pool_(std::make_shared<ConnectionPool>(options.max_connections)) {
  const std::string& listen = options.listen;
  const char* const argument = options.name.empty() ? "name" : "listen";
  HostPort where = parse_address("TransferEngine", argument, listen);
  const std::vector<SocketAddress> addresses = resolve(where);
  MK_CHECK(std::all_of(addresses.begin(), addresses.end(), is_unicast),
           "TransferEngine: ", argument,
           " must be an address at which peers reach this engine, got ", listen);
  auto nics = std::make_shared<Nics>(options.nics, options.near_nics, options.nics_required);
  bound_ = bind_socket(listen, addresses, options_.is_for_machines());
  where.port = bound_port(bound_);
  const std::string address = where.name();
  const std::string& name = options.name.empty() ? address : options.name;
  const uint64_t instance = random_value<uint64_t>() | 1;  // never 0
  std::vector<std::string> written{address};
  for (const std::string& other : options.reached_at) {
    const HostPort from = parse_address("TransferEngine", "reached_at", other);
    MK_CHECK(from.port != 0, "TransferEngine: reached_at must have a port other than 0, got \"",
             other, "\"");
    written.push_back(from.name());
  }
  own_ = std::make_shared<Endpoint>(name, address, instance, options.credentials, std::move(nics),
                                    options.spin, options.local, options.tcp,
                                    OwnAddresses(written, numeric_name(bound_address(bound_))));
  start_server();
  enter_process(own_);
}

void Engine::start_server() {
  std::vector<Fd> listening;
  if (options_.is_for_processes()) {
    const SocketAddress address = within_machine(bound_address(bound_));
    try {
      listening.push_back(bind_socket(own_->address, {address}, false));
    } catch (const SystemError&) {
      // A forked child of a closed engine of this name may still hold the address.
      if (!options_.is_for_machines()) throw;
    }
  }
  if (options_.is_for_machines()) listening.push_back(std::move(bound_));
  if (!listening.empty()) server_ = std::make_unique<Server>(*own_, std::move(listening));
}

RegionRef Engine::add_region(const Range& range, Rights rights, int device) {
  owner_.check("register", "engine");
  if (device >= 0 && range.num_bytes > 0) check_gpu_memory(range, device);
  Region region{range, rights, device};
  try {
    region.on_nics = own_->nics->add(range, nic_rights(rights), device);
    if (region.on_nics) region.note = region.on_nics->note;
  } catch (const std::runtime_error& error) {
    if (options_.nics_required) throw;
    region.note = error.what();
  }
  return own_->regions.add(std::move(region));
}

bool Engine::remove_region(const RegionRef& region) {
  return forked() || own_->regions.remove(region);
}

RegionRef Engine::open_window(const RegionRef& region, const Range& range) {
  owner_.check("window", "engine");
  return own_->regions.open_window(region, range);
}

void Engine::close_window(const RegionRef& window) {
  if (!forked()) own_->regions.close_window(window);
}

PeerRef Engine::open(const PeerAddress& to, double deadline_s) try {
  owner_.check("open", "engine");
  const Deadline deadline = Deadline::after(deadline_s);
  return start_peer(to.name, find_route(to, options_, own_, lost_links_, deadline), deadline);
} catch (const std::system_error& error) {  // as when there is no descriptor left
  throw TransferError(to.name, reason_of(error));
}

PeerRef Engine::open_file(const std::string& name, const std::string& place,
                          double deadline_s) try {
  owner_.check("open", "engine");
  return start_peer(name, file_route(place, options_), Deadline::after(deadline_s));
} catch (const std::system_error& error) {
  throw TransferError(name, reason_of(error));
}

PeerRef Engine::start_peer(const std::string& name, Route route, const Deadline& deadline) {
  const auto peer = std::make_shared<Peer>(name, std::move(route), own_, pool_, *stats_);
  {
    const std::lock_guard lock(mutex_);
    MK_CHECK(!closed_, "open: the engine is closed");
    peers_.push_back(peer);  // before it connects, so that close() can interrupt it
  }
  try {
    peer->start(deadline);
  } catch (...) {
    close_peer(peer);
    throw;
  }
  return peer;
}

void Engine::close_peer(const PeerRef& peer) {
  if (forked()) return;
  peer->close({"the peer was closed", FailureKind::kClosed});
  const std::lock_guard lock(mutex_);
  peers_.erase(std::remove(peers_.begin(), peers_.end(), peer), peers_.end());
}

TicketRef Engine::submit(Peer& peer, Request request, double deadline_s) {
  prepare(peer, request);
  return peer.submit(std::move(request), Deadline::after(deadline_s));
}

void Engine::prepare(const Peer& peer, Request& request) const {
  const char* const op = request.op;
  owner_.check(op, "engine");
  MK_CHECK(!request.notify || peer.transport() != Transport::kFile, op,
           ": notify must be None for a file, which has no one to notify, got ",
           request.notify->size(), " bytes");
  MK_CHECK(
      !request.verify || peer.transport() != Transport::kFile, op,
      ": checksum must be False for a file, which has no process that could compare, got True");
  transfer::prepare(own_->regions, request);
}

TicketRef Engine::sync(Peer& peer, double deadline_s) {
  owner_.check("sync", "engine");
  MK_CHECK(peer.transport() == Transport::kFile, "sync: peer must be a file, got ", peer.name());
  Request request{};
  request.op = "sync";
  request.direction = Direction::kWrite;
  request.sizes = {0};
  request.notify = "";  // see FileChannel
  request.may_notify_again = true;
  return peer.submit(std::move(request), Deadline::after(deadline_s));
}

Explanation Engine::explain_path(const Peer& peer, const Range& local, const Range& remote,
                                 double deadline_s) const {
  owner_.check("explain_path", "engine");
  return explain(peer, own_->regions, local, remote, Deadline::after(deadline_s));
}

std::vector<RegionTable::Listed> Engine::list_regions(const Peer& peer, double deadline_s) const {
  owner_.check("regions", "engine");
  return transfer::list_regions(peer, Deadline::after(deadline_s));
}

void Engine::serve(std::shared_ptr<Service> service) {
  if (forked()) return;
  own_->service.set(std::move(service));
}

void Engine::stop_serving(const Service& service) {
  if (!forked()) own_->service.end(service);
}

std::unique_ptr<RpcResponse> Engine::call(Peer& peer, const RpcRequest& request,
                                          const Deadline& deadline) const {
  owner_.check(request.op, "engine");
  return peer.call(request, deadline);
}

std::vector<Notification> Engine::take_notifications(const Deadline& deadline) {
  owner_.check("receive_notifications", "engine");
  return own_->notifications.take(deadline);
}

void Engine::accept_notifications() {
  owner_.check("receive_notifications", "engine");
  own_->notifications.accept();
}

std::vector<Notification> Engine::refuse_notifications() {
  owner_.check("refuse_notifications", "engine");
  return own_->notifications.refuse();
}

std::vector<Stats::Row> Engine::stats() const {
  owner_.check("stats", "engine");
  return stats_->table();
}

Rejections::Table Engine::rejections() const {
  owner_.check("rejections", "engine");
  return own_->rejections.table();
}

bool Engine::close() {
  if (forked()) return true;
  const std::lock_guard closing(close_mutex_);
  std::vector<PeerRef> peers;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    peers.swap(peers_);
  }
  const ErrorReason reason{"the engine was closed", FailureKind::kClosed};
  pool_->close(reason);  // else each peer makes room for one that is waiting
  for (const PeerRef& peer : peers) peer->interrupt(reason);
  for (const PeerRef& peer : peers) peer->close(reason);
  own_->service.set(nullptr);
  leave_process(*own_);
  own_->notifications.close();
  // While the sessions exist: they notice the death of initiators that copy by themselves.
  all_removed_ &= own_->regions.close();
  server_.reset();
  own_->nics->close();
  bound_.close();
  return all_removed_;
}

}  // namespace mk::transfer
