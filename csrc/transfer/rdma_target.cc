#include "transfer/rdma_target.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "common/check.h"
#include "transfer/error.h"

namespace mk::transfer {
namespace {

template <class Entry>
void append(std::string& bytes, const Entry& entry) {
  bytes.append(reinterpret_cast<const char*>(&entry), sizeof(entry));
}

}  // namespace

#if MK_HAVE_VERBS
std::string RdmaTarget::nics() const {
  std::string answer;
  for (size_t i = 0; i < own_.nics->size(); ++i) {
    const Nic& nic = (*own_.nics)[i];
    NicEntry entry{};
    const std::string& name = nic.device->name();
    std::memcpy(entry.name.data(), name.data(), std::min(name.size(), entry.name.size() - 1));
    entry.mb_per_s = static_cast<uint64_t>(nic.gb_per_s * 1e3);
    try {
      const rdma::PortInfo port = nic.device->port(nic.port);
      entry.link_layer = code_of_link_layer(port.link_layer);
      entry.is_active = port.state == "ACTIVE";
    } catch (const std::exception&) {
      // The NIC has gone away since; it keeps its number.
    }
    append(answer, entry);
  }
  return answer;
}

std::string RdmaTarget::attach(const AttachRequest& request) {
  rails_.erase(request.rail);
  if (request.nic >= own_.nics->size()) throw Refused("there is no such NIC");
  if (request.rail >= kMaxRails) throw Refused("too many queue pairs");
  const Nic& nic = (*own_.nics)[request.nic];
  try {
    active_port(nic);
    const auto queue = rdma::CompletionQueue::make(nic.device, 2);
    rdma::QueuePairOptions options;
    options.port = nic.port;
    options.max_sends = 1;  // it answers, and never asks
    options.max_sges = 1;
    const auto pair = rdma::QueuePair::make(queue, options);
    std::string answer;
    append(answer, entry_of(pair->endpoint()));
    pair->connect(endpoint_of(request.initiator), {});
    rails_[request.rail] = pair;
    return answer;
  } catch (const Failure&) {
    throw;
  } catch (const std::exception& error) {
    throw Refused(concat("on the peer's ", nic.device->name(), ": ", error.what()));
  }
}

std::string RdmaTarget::detach(const DetachRequest& request) {
  rails_.erase(request.rail);
  return "";
}

std::string RdmaTarget::keys() const {
  std::string answer;
  for (const RegionRef& region : own_.regions.all()) {
    if (!region->on_nics || !(region->rights & (kRemoteRead | kRemoteWrite))) continue;
    const NicMemory& memory = *region->on_nics;
    std::string keys;
    for (uint32_t nic = 0; nic < memory.regions.size(); ++nic) {
      try {
        const rdma::Resource::Use use(*memory.regions[nic], "keys");
        for (const rdma::Piece& piece : memory.regions[nic]->pieces()) {
          append(keys, KeyEntry{piece.span.address, piece.span.num_bytes, piece.mr->rkey, nic});
        }
      } catch (const InvalidArgument&) {
        // It is being closed.
      }
    }
    const KeysEntry entry{region->range.address, region->range.num_bytes, memory.near,
                          region->rights, static_cast<uint32_t>(keys.size() / sizeof(KeyEntry))};
    if (answer.size() + sizeof(entry) + keys.size() > kMaxKeysBytes) break;
    append(answer, entry);
    answer += keys;
  }
  return answer;
}

void RdmaTarget::close() noexcept { rails_.clear(); }
#else
std::string RdmaTarget::nics() const { return ""; }
std::string RdmaTarget::attach(const AttachRequest&) { throw Refused("there is no such NIC"); }
std::string RdmaTarget::detach(const DetachRequest&) { return ""; }
std::string RdmaTarget::keys() const { return ""; }
void RdmaTarget::close() noexcept {}
#endif

}  // namespace mk::transfer
