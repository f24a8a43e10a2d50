// find_route: which transport reaches a peer, and why that one.
//
//   Route route = find_route({"decode-1", "10.0.0.2:4711", instance}, options, own_endpoint,
//                            lost_links, deadline);
//   route.channels, route.reasons
//   Route disk = file_route("file:/mnt/ssd/pool", options);
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transfer/base/limit.h"
#include "transfer/channel/channel.h"
#include "transfer/net/endpoint.h"
#include "transfer/net/lost_links.h"
#include "transfer/peer/engine_options.h"

namespace mk::transfer {

struct PeerAddress {
  std::string name;     // for errors, statistics and Peer::name
  std::string address;  // "host:port"
  uint64_t instance;    // which engine must answer there; 0: any
};

// How a peer is reached, and the findings that led to it.
struct Route {
  std::vector<std::unique_ptr<Channel>> channels;  // of one transport; the first one leads
  std::vector<std::string> reasons;                // a sentence each
};

// By local if the peer is in this process, else shm if it is on this machine, else rdma if both
// have NICs, else tcp; among the allowed ones. Never to a file, whatever the address is: it may
// come from another process. The channels are not connected. Throws InvalidArgument (address),
// Unavailable (no such host), TransferError.
Route find_route(const PeerAddress& to, const EngineOptions& options,
                 const std::shared_ptr<Endpoint>& own,
                 const std::shared_ptr<LostLinksTable>& lost_links, const Deadline& deadline);

// To a file of this machine, which is opened. Throws InvalidArgument (the name, or the transport
// `file` is not allowed), TransferError (there is no such file).
Route file_route(const std::string& name, const EngineOptions& options);

}  // namespace mk::transfer
