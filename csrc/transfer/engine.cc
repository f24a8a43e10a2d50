#include "transfer/engine.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

#include "common/check.h"
#include "transfer/address.h"
#include "transfer/disk_file.h"
#include "transfer/error.h"
#include "transfer/file_channel.h"
#include "transfer/local_channel.h"
#include "transfer/shm_channel.h"
#include "transfer/wire.h"
#include "transfer/wire_channel.h"

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
  for (size_t i = 0; i < request.sizes.size() && !request.local.empty(); ++i) {
    MK_CHECK(request.sizes[i] > 0, op, ": descriptors[", i, "] num_bytes must be positive, got 0");
  }
  MK_CHECK(!request.notify || request.notify->size() <= kMaxNotificationBytes, op,
           ": notify must be at most ", kMaxNotificationBytes, " bytes, got ",
           request.notify->size());
  try {
    const Rights needed = writes ? 0 : kLocalWrite;
    return table.check(request.ranges(request.local), needed, "local", 0);
  } catch (const Refused& refused) {
    throw InvalidArgument(concat(op, ": ", refused.what()));
  }
}

Channels file_channels(const PeerAddress& to, const std::string& path, int num_lanes) {
  std::shared_ptr<const DiskFile> file;
  try {
    file = std::make_shared<const DiskFile>(path);
  } catch (const Failure& failure) {
    throw TransferError(to.name, failure.what());
  }
  Channels channels;
  for (int i = 0; i < num_lanes; ++i) channels.push_back(std::make_unique<FileChannel>(file));
  return channels;
}

}  // namespace

Engine::Engine(const EngineOptions& options) : options_(options) {
  const std::string& listen = options.listen;
  const char* const argument = options.name.empty() ? "name" : "listen";
  HostPort where = parse_address("TransferEngine", argument, listen);
  const std::vector<SocketAddress> addresses = resolve(where);
  MK_CHECK(std::all_of(addresses.begin(), addresses.end(), is_unicast),
           "TransferEngine: ", argument,
           " must be an address at which peers reach this engine, got ", listen);
  bound_ = bind_socket(listen, addresses, options.tcp);
  where.port = bound_port(bound_);
  const std::string address = where.name();
  const std::string& name = options.name.empty() ? address : options.name;
  own_ = std::make_shared<Endpoint>(name, address, random_instance(), options.credentials);
  start_server();
  enter_process(own_);
}

void Engine::start_server() {
  std::vector<Fd> listening;
  if (options_.shm) {
    const SocketAddress address = within_machine(bound_address(bound_));
    try {
      listening.push_back(bind_socket(own_->address, {address}, false));
    } catch (const SystemError&) {
      // A forked child of an engine of this name, closed since, still has it.
      if (!options_.tcp) throw;
    }
  }
  if (options_.tcp) listening.push_back(std::move(bound_));
  if (!listening.empty()) server_ = std::make_unique<Server>(*own_, std::move(listening));
}

RegionRef Engine::add_region(const Range& range, Rights rights) {
  owner_.check("register", "engine");
  return own_->regions.add(range, rights);
}

bool Engine::remove_region(const RegionRef& region) {
  return forked() || own_->regions.remove(region);
}

Channels Engine::make_channels(const PeerAddress& to) const {
  if (const auto path = path_of_file(to.address)) {
    MK_CHECK(options_.file, "open: name must be of an engine without the transport file, got \"",
             to.address, "\"");
    return file_channels(to, *path, options_.num_lanes);
  }
  const HostPort where = parse_address("open", "name", to.address);
  MK_CHECK(where.port != 0, "open: name must have a port other than 0, got \"", to.address, "\"");
  Channels channels;
  if (const auto here = options_.local ? find_in_process(where.name()) : nullptr) {
    if (to.instance != 0 && here->instance != to.instance) {
      throw TransferError(to.name, kAnotherEngine);
    }
    channels.push_back(std::make_unique<LocalChannel>(own_->name, *here));
    return channels;
  }
  if (!options_.shm && !options_.tcp) {
    throw TransferError(to.name, "no engine of that name in this process");
  }
  const std::vector<SocketAddress> addresses = resolve(where);
  std::vector<SocketAddress> here;
  if (options_.shm) {
    std::transform(addresses.begin(), addresses.end(), std::back_inserter(here), within_machine);
  }
  const bool is_here = options_.shm && ShmChannel::reaches(here);
  if (!is_here && !options_.tcp) {
    throw TransferError(to.name, "no engine of that name on this machine");
  }
  const auto identity = std::make_shared<PeerIdentity>(to.instance);
  for (int i = 0; i < options_.num_lanes; ++i) {
    if (is_here) {
      channels.push_back(std::make_unique<ShmChannel>(own_, where.host, here, identity));
    } else {
      channels.push_back(std::make_unique<WireChannel>(own_, where.host, addresses, identity));
    }
  }
  return channels;
}

PeerRef Engine::open(const PeerAddress& to, double deadline_s) {
  owner_.check("open", "engine");
  const Deadline deadline = Deadline::after(deadline_s);
  const auto peer = std::make_shared<Peer>(to.name, make_channels(to), own_, stats_);
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
  const char* const op = request.writes() ? "write" : "read";
  owner_.check(op, "engine");
  MK_CHECK(!request.notify || peer.transport() != Transport::kFile, op,
           ": notify must be None for a file, which has nobody to be notified, got ",
           request.notify->size(), " bytes");
  request.regions = check_request(own_->regions, request);
  return peer.submit(std::move(request), Deadline::after(deadline_s));
}

TicketRef Engine::sync(Peer& peer, double deadline_s) {
  owner_.check("sync", "engine");
  MK_CHECK(peer.transport() == Transport::kFile, "sync: peer must be a file, got ", peer.name());
  Request request{};
  request.direction = Direction::kWrite;
  request.sizes = {0};
  request.notify = "";  // see FileChannel
  request.may_notify_again = true;
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

bool Engine::close() {
  if (forked()) return true;
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
  all_removed_ &= own_->regions.close();  // also ends what engines of this process do here
  bound_.close();
  return all_removed_;
}

}  // namespace mk::transfer
