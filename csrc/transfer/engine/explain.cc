#include "transfer/engine/explain.h"

#include "common/check.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

constexpr char kStaged[] = " goes by way of pinned memory ";

RegionRef check_local(const RegionTable& regions, const Range& range) {
  try {
    return regions.check(Ranges::rows({range}), 0, "local", 0).front();
  } catch (const Refused& refused) {
    throw InvalidArgument(concat("explain_path: ", refused.what()));
  }
}

// For a read, whose target is here.
std::string local_refusal(const RegionTable& regions, const Range& range) {
  try {
    regions.check(Ranges::rows({range}), kLocalWrite, "local", 0);
  } catch (const Refused& refused) {
    return refused.what();
  }
  return "";
}

std::string remote_refusal(Channel& channel, const Request& request, uint64_t id,
                           const Limit& limit) {
  channel.post({Work::Kind::kCheck, &request, id, {}, false}, limit);
  return channel.finish(limit).refusal.text;
}

// Lets `ask` use another channel. False: there is none.
template <class Ask>
bool ask_peer(const Peer& peer, const Deadline& deadline, Ask ask) {
  try {
    const std::unique_ptr<Channel> channel = peer.another_channel();
    if (!channel) return false;
    Interrupt unused;
    const Limit limit{deadline, unused};
    channel->connect(limit);
    ask(*channel, limit);
    channel->disconnect();
    return true;
  } catch (const std::exception& error) {  // also when there is no descriptor left
    throw TransferError(peer.name(), reason_of(error));
  }
}

// The peer's GPU that holds the range, if it tells; else -1.
int peer_device(Channel& channel, const Range& range, const Limit& limit) {
  try {
    for (const RegionTable::Listed& region : channel.list_regions(limit)) {
      if (region.range.contains(range)) return region.device;
    }
  } catch (const Refused&) {
    // The peer does not tell.
  }
  return -1;
}

}  // namespace

Explanation explain(const Peer& peer, const RegionTable& own_regions, const Range& local,
                    const Range& remote, const Deadline& deadline) {
  const RegionRef region = check_local(own_regions, local);
  const int device = region->device;  // the GPU that owns the memory; -1: the host
  Explanation found{{}, peer.reasons(), "", local_refusal(own_regions, local)};
  Request request{};
  request.local = {local.address};
  request.remote = {remote.address};
  request.sizes = {request.num_bytes = remote.num_bytes};
  request.regions = {region};
  ask_peer(peer, deadline, [&](Channel& channel, const Limit& limit) {
    request.direction = Direction::kWrite;
    found.write_refusal = remote_refusal(channel, request, 1, limit);
    request.direction = Direction::kRead;
    const std::string refusal = remote_refusal(channel, request, 2, limit);
    if (found.read_refusal.empty()) found.read_refusal = refusal;
    found.path = channel.path_to(remote, device);
    if (found.path.paths.empty()) found.path.paths = peer.paths();
    const std::string trouble = peer.trouble();
    if (!trouble.empty()) found.reasons.push_back(concat("requests now do without ", trouble));
    found.reasons.push_back(found.path.why);
    if (found.path.means != "connection") return;
    if (device >= 0) found.reasons.push_back(concat("cuda:", device, kStaged, "here"));
    const int there = peer_device(channel, remote, limit);
    if (there >= 0) found.reasons.push_back(concat("the peer's cuda:", there, kStaged, "there"));
  });
  return found;
}

std::vector<RegionTable::Listed> list_regions(const Peer& peer, const Deadline& deadline) {
  std::vector<RegionTable::Listed> listed;
  const auto ask = [&](Channel& channel, const Limit& limit) {
    listed = channel.list_regions(limit);
  };
  if (!ask_peer(peer, deadline, ask))
    throw TransferError(peer.name(), {kRegionsNotTold, FailureKind::kIncompatible});
  return listed;
}

}  // namespace mk::transfer
