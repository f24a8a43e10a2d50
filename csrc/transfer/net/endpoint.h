// Endpoint: what an engine offers to its peers, and the process's list of them for `local`.
//
// Layer: transfer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "common/owner.h"
#include "transfer/base/notifications.h"
#include "transfer/base/service.h"
#include "transfer/memory/nics.h"
#include "transfer/memory/region_table.h"
#include "transfer/net/credentials.h"
#include "transfer/net/own_addresses.h"
#include "transfer/wire/reject_reason.h"

namespace mk::transfer {

struct Endpoint {
  Endpoint(std::string name, std::string address, uint64_t instance, Credentials credentials,
           std::shared_ptr<Nics> nics = std::make_shared<Nics>(),
           std::chrono::microseconds spin = {}, bool is_local = true, bool is_tcp = true,
           OwnAddresses addresses = {})
      : name(std::move(name)),
        address(std::move(address)),
        instance(instance),
        credentials(std::move(credentials)),
        nics(std::move(nics)),
        spin(spin),
        is_local(is_local),
        is_tcp(is_tcp),
        addresses(std::move(addresses)) {}

  const std::string name;     // sent to peers
  const std::string address;  // "host:port"; also the name, unless there is a metadata server
  const uint64_t instance;    // random, never 0: unique among engines, also across restarts
  const Credentials credentials;
  const std::shared_ptr<Nics> nics;      // may have no NICs, but is not null
  const std::chrono::microseconds spin;  // before a wait for a peer's next bytes sleeps
  const bool is_local;                   // the process's other engines may reach it by `local`
  const bool is_tcp;                     // other machines may move its memory over connections
  const OwnAddresses addresses;          // by which peers with the secret may have come here
  const Owner owner;
  std::atomic<bool> has_left{false};  // the process's engines: it was closed
  RegionTable regions;
  NotificationQueue notifications;
  Rejections rejections;
  ServiceSlot service;
};

// The engines of this process, by address. Engine adds and removes them. A forked child does not
// see its parent's: what its memory has of them are copies.
void enter_process(const std::shared_ptr<Endpoint>& endpoint);  // throws InvalidArgument if taken
void leave_process(Endpoint& endpoint);
std::shared_ptr<Endpoint> find_in_process(const std::string& address);  // null if not here

}  // namespace mk::transfer
