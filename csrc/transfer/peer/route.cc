#include "transfer/peer/route.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/file/disk_file.h"
#include "transfer/file/file_channel.h"
#include "transfer/local/local_channel.h"
#include "transfer/net/address.h"
#include "transfer/net/peer_identity.h"
#include "transfer/rdma/rdma_channel.h"
#include "transfer/shm/shm_channel.h"
#include "transfer/tcp/tcp_channel.h"
#include "transfer/wire/reject_reason.h"

namespace mk::transfer {
namespace {

std::string not_chosen(const char* transport, bool allowed, const std::string& why_not) {
  return concat(transport, " was not chosen: ", allowed ? why_not : "this engine does without it");
}

// As over a connection; see handshake.cc.
RejectReason judge(const Credentials& own, const Credentials& neighbours) {
  if (!own.secret && !neighbours.secret) return RejectReason::kNone;
  if (!own.secret) return RejectReason::kNoSecret;
  if (!neighbours.secret) return RejectReason::kUnwantedSecret;
  return own.secret->is_same(*neighbours.secret) ? RejectReason::kNone : RejectReason::kOtherSecret;
}

// One channel a lane.
template <class MakeChannel>
void add_lanes(Route& route, const EngineOptions& options, MakeChannel make) {
  for (int i = 0; i < options.num_lanes; ++i) route.channels.push_back(make());
}

}  // namespace

Route file_route(const std::string& name, const EngineOptions& options) {
  const std::string path = path_of_file(name);
  MK_CHECK(options.file, "open: name must be of an engine without the transport file, got \"", name,
           "\"");
  std::shared_ptr<const DiskFile> file;
  try {
    file = std::make_shared<const DiskFile>(path);
  } catch (const Failure& failure) {
    throw TransferError(name, failure.reason());
  }
  Route route{{}, {concat("file: ", path, " of this machine")}};
  add_lanes(route, options, [&] { return std::make_unique<FileChannel>(file); });
  return route;
}

Route find_route(const PeerAddress& to, const EngineOptions& options,
                 const std::shared_ptr<Endpoint>& own,
                 const std::shared_ptr<LostLinksTable>& lost_links, const Deadline& deadline) {
  const HostPort where = parse_address("open", "name", to.address);
  MK_CHECK(where.port != 0, "open: name must have a port other than 0, got \"", to.address, "\"");
  Route route;
  auto& [channels, reasons] = route;
  const auto neighbour = find_in_process(where.name());
  if (options.local && neighbour && neighbour->is_local) {
    if (to.instance != 0 && neighbour->instance != to.instance) {
      throw TransferError(to.name, another_engine());
    }
    const RejectReason reject_reason = judge(own->credentials, neighbour->credentials);
    if (reject_reason != RejectReason::kNone) {
      neighbour->rejections.count(reason_at_target(reject_reason).text);
      throw TransferError(to.name, reason_at_initiator(reject_reason));
    }
    channels.push_back(std::make_unique<LocalChannel>(own->name, neighbour));
    reasons.push_back(concat("local: the engine at ", to.address, " is of this process"));
    return route;
  }
  reasons.push_back(not_chosen("local", options.local,
                               neighbour ? "the engine of that name in this process does without it"
                                         : "no engine of this process has that name"));
  if (!options.is_for_processes() && !options.is_for_machines()) {
    throw TransferError(to.name, {"no engine of that name in this process", FailureKind::kGone});
  }

  const std::vector<SocketAddress> addresses = resolve(where);
  const auto identity = std::make_shared<PeerIdentity>(to.instance, to.name, lost_links);
  ErrorReason why_not;
  if (options.is_for_processes()) {
    std::vector<SocketAddress> here;
    std::transform(addresses.begin(), addresses.end(), std::back_inserter(here), within_machine);
    const ShmChannel::Paths paths{options.shm, options.cuda_ipc};
    const LocalUsers& users = own->credentials.local_users;
    if (ShmChannel::reaches(here, users, paths, why_not)) {
      reasons.push_back(concat(options.shm ? "shm" : "cuda_ipc",
                               ": an engine that this user may use ", "listens at ", to.address,
                               " within this machine"));
      add_lanes(route, options,
                [&] { return std::make_unique<ShmChannel>(own, where, here, identity, paths); });
      return route;
    }
  }
  if (!options.is_for_machines()) {
    if (deadline.passed()) throw TransferError(to.name, deadline.reason());
    const std::string none = concat("no engine of that name on this machine: ", why_not.text);
    throw TransferError(to.name, {none, why_not.kind});
  }
  reasons.push_back(not_chosen("shm", options.is_for_processes(), why_not.text));

  if (own->nics->size() > 0) {
    auto rdma = std::make_unique<RdmaChannel>(own, where, addresses, identity, !options.tcp);
    if (!options.tcp || rdma->finds_nics(deadline, why_not.text)) {
      reasons.push_back(concat("rdma: ", own->nics->size(), " NICs of this engine"));
      channels.push_back(std::move(rdma));
      return route;
    }
    reasons.push_back(concat("rdma was not chosen: ", why_not.text));
  }
  reasons.push_back(concat("tcp: ", options.num_lanes, " connections to ", to.address));
  add_lanes(route, options,
            [&] { return std::make_unique<TcpChannel>(own, where, addresses, identity); });
  return route;
}

}  // namespace mk::transfer
