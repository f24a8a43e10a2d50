#include "transfer/server/rdma_target.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/memory/nic_gpus.h"

namespace mk::transfer {
namespace {

template <class Body>
Body read(const std::vector<char>& bytes) {
  Body query;
  std::memcpy(&query, bytes.data(), sizeof(query));
  return query;
}

template <class Item>
std::vector<Item> read_all(const std::vector<char>& bytes) {
  std::vector<Item> items(bytes.size() / sizeof(Item));
  if (!items.empty()) std::memcpy(items.data(), bytes.data(), bytes.size());
  return items;
}

constexpr double kFlushCheckS = 0.1;  // the delay in noticing that the limit is reached

template <class Entry>
void append(std::string& bytes, const Entry& entry) {
  bytes.append(reinterpret_cast<const char*>(&entry), sizeof(entry));
}

void await_immediate(rdma::CompletionQueue& queue, const Limit& limit) {
  const auto is_immediate = [](const rdma::Completion& completion) {
    return completion.kind == rdma::Completion::Kind::kImmediate;
  };
  while (true) {
    const auto completions = queue.poll(1);
    if (std::any_of(completions.begin(), completions.end(), is_immediate)) return;
    limit.check();
    queue.wait(kFlushCheckS);
  }
}

}  // namespace

std::string RdmaTarget::respond(Op op, const std::vector<char>& query, const Limit& limit) {
  switch (op) {
    case Op::kNics:
      return nics();
    case Op::kAttach:
      return attach(read<AttachRequest>(query));
    case Op::kDetach:
      return detach(read<DetachRequest>(query));
    case Op::kFlush:
      return flush(read_all<uint32_t>(query), limit);
    default:
      return keys(read_all<uint64_t>(query));
  }
}

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
      // The NIC has disappeared; it keeps its number.
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
    rdma::QueuePairOptions options = queue_pair_options(nic);
    options.max_sends = 1;  // it answers and never asks
    options.max_immediates = 1;
    options.max_sges = 1;
    const auto queue = rdma::CompletionQueue::make(nic.device, 2);
    const auto pair = rdma::QueuePair::make(queue, options);
    std::string answer;
    append(answer, entry_of(pair->endpoint()));
    pair->connect(endpoint_of(request.initiator), connect_options(nic));
    rails_[request.rail] = {queue, pair};
    return answer;
  } catch (const Failure&) {
    throw;
  } catch (const std::exception& error) {
    throw Refused(ErrorReason(concat("on the peer's ", nic.device->name(), ": ", error.what()),
                              FailureKind::kDevice));
  }
}

std::string RdmaTarget::detach(const DetachRequest& request) {
  rails_.erase(request.rail);
  return "";
}

std::string RdmaTarget::keys(const std::vector<uint64_t>& addresses) const {
  std::string answer;
  for (const RegionRef& region : own_.regions.around(addresses)) {
    // A key is of the whole region: a peer that has it is not held to the windows.
    const Rights rights = nic_rights(region->rights);
    if (!region->on_nics || !(rights & kRemoteRights)) continue;
    const NicMemory& memory = *region->on_nics;
    std::string keys;
    for (uint32_t nic = 0; nic < memory.regions.size(); ++nic) {
      if (!memory.regions[nic]) continue;
      try {
        const rdma::Resource::Use use(*memory.regions[nic], "keys");
        for (const rdma::Piece& piece : memory.regions[nic]->pieces()) {
          append(keys, KeyEntry{piece.span.address, piece.span.num_bytes, piece.mr->rkey, nic});
        }
      } catch (const InvalidArgument&) {
        // It is being closed.
      }
    }
    const KeysEntry entry{region->range.address, region->range.num_bytes, memory.near, rights,
                          static_cast<uint32_t>(keys.size() / sizeof(KeyEntry))};
    if (answer.size() + sizeof(entry) + keys.size() > kMaxKeysBytes) break;
    append(answer, entry);
    answer += keys;
  }
  return answer;
}

std::string RdmaTarget::flush(const std::vector<uint32_t>& rails, const Limit& limit) {
  for (const uint32_t number : rails) {
    const auto found = rails_.find(number);
    if (found == rails_.end()) throw Refused("there is no such rail");
    rdma::CompletionQueue& queue = *found->second.queue;
    try {
      await_immediate(queue, limit);
    } catch (const SystemError& error) {
      throw Refused(
          ErrorReason(concat("on the peer's ", queue.device()->name(), ": ", error.what()),
                      FailureKind::kDevice));
    }
  }
  flush_gpus(own_.regions.all());
  return "";
}

void RdmaTarget::close() noexcept { rails_.clear(); }

}  // namespace mk::transfer
