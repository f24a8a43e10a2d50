#include "transfer/engine.h"

#include <algorithm>
#include <random>
#include <utility>

#include "common/check.h"
#include "transfer/address.h"
#include "transfer/error.h"
#include "transfer/local_channel.h"
#include "transfer/tcp_channel.h"
#include "transfer/wire.h"

namespace mk::transfer {
namespace {

uint64_t random_instance() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;  // never 0
}

// Checks what can be known without the peer; returns the local regions.
std::vector<RegionRef> check_request(const RegionTable& table, const Request& request) {
  const bool writes = request.direction == Direction::kWrite;
  const char* const op = writes ? "write" : "read";
  MK_CHECK(!request.local.empty() || request.notify, op,
           ": descriptors must not be empty unless notify is given");
  for (size_t i = 0; i < request.local.size(); ++i) {
    MK_CHECK(request.local[i].num_bytes > 0, op, ": descriptors[", i,
             "] num_bytes must be positive, got 0");
  }
  MK_CHECK(!request.notify || request.notify->size() <= kMaxNotificationBytes, op,
           ": notify must be at most ", kMaxNotificationBytes, " bytes, got ",
           request.notify->size());
  try {
    const Rights needed = writes ? 0 : kLocalWrite;
    return table.check(request.local.data(), request.local.size(), needed, "local", 0);
  } catch (const Refused& refused) {
    throw InvalidArgument(concat(op, ": ", refused.what()));
  }
}

}  // namespace

Engine::Engine(const EngineOptions& options) : options_(options) {
  HostPort where = parse_name("TransferEngine", options.name);
  const std::vector<SocketAddress> addresses = resolve(where);
  MK_CHECK(std::all_of(addresses.begin(), addresses.end(), is_unicast),
           "TransferEngine: name must be an address at which peers reach this engine, got ",
           options.name);
  bound_ = bind_socket(options.name, addresses, options.tcp);
  where.port = bound_port(bound_);
  own_ = std::make_shared<Endpoint>(where.name(), random_instance(), options.credentials);
  if (options.tcp) server_ = std::make_unique<Server>(*own_, std::move(bound_));
  enter_process(own_);
}

RegionRef Engine::add_region(const Range& range, Rights rights) {
  owner_.check("register", "engine");
  return own_->regions.add(range, rights);
}

void Engine::remove_region(const RegionRef& region) {
  if (!forked()) own_->regions.remove(region);
}

std::unique_ptr<Channel> Engine::make_channel(const std::string& name) const {
  const HostPort where = parse_name("open", name);
  MK_CHECK(where.port != 0, "open: name must have a port other than 0, got \"", name, "\"");
  const auto here = options_.local ? find_in_process(where.name()) : nullptr;
  if (here) return std::make_unique<LocalChannel>(own_->name, *here);
  if (!options_.tcp) throw TransferError(name, "no engine of that name in this process");
  return std::make_unique<TcpChannel>(own_, where);
}

PeerRef Engine::open(const std::string& name, double deadline_s) {
  owner_.check("open", "engine");
  const Deadline deadline = Deadline::after(deadline_s);
  const auto peer = std::make_shared<Peer>(name, make_channel(name), own_, stats_);
  {
    const std::lock_guard lock(mutex_);
    MK_CHECK(!closed_, "open: the engine is closed");
    peers_.push_back(peer);  // before it connects, so that close() can interrupt that
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
  peer->close("the peer was closed");
  const std::lock_guard lock(mutex_);
  peers_.erase(std::remove(peers_.begin(), peers_.end(), peer), peers_.end());
}

TicketRef Engine::submit(Peer& peer, Request request, double deadline_s) {
  owner_.check(request.direction == Direction::kWrite ? "write" : "read", "engine");
  request.regions = check_request(own_->regions, request);
  return peer.submit(std::move(request), Deadline::after(deadline_s));
}

std::vector<Notification> Engine::take_notifications(const Deadline& deadline) {
  owner_.check("receive_notifications", "engine");
  return own_->notifications.take(deadline);
}

Stats::Table Engine::stats() const {
  owner_.check("stats", "engine");
  return stats_->table();
}

Rejections::Table Engine::rejections() const {
  owner_.check("stats", "engine");
  return own_->rejections.table();
}

void Engine::close() {
  if (forked()) return;
  const std::lock_guard closing(close_mutex_);
  std::vector<PeerRef> peers;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    peers.swap(peers_);
  }
  for (const PeerRef& peer : peers) peer->close("the engine was closed");
  leave_process(*own_);
  own_->notifications.close();
  server_.reset();
  own_->regions.close();  // also ends what engines of this process do here
  bound_.close();
}

}  // namespace mk::transfer
