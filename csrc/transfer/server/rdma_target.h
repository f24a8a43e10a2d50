// RdmaTarget: a session's service to an initiator with NICs: it lists our NICs and the keys of our
// regions, and connects queue pairs to the initiator's. From then on the initiator's NIC moves the
// data alone, until the queue pair ends, at the latest together with the session.
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rdma/queue_pair.h"
#include "transfer/base/limit.h"
#include "transfer/net/endpoint.h"
#include "transfer/wire/nic_wire.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

class RdmaTarget {
 public:
  explicit RdmaTarget(const Endpoint& own) : own_(own) {}

  // Answers one of the ops in nic_wire.h, whose size check_header has checked. Throws Refused.
  std::string respond(Op op, const std::vector<char>& query, const Limit& limit);

  void close() noexcept;  // all queue pairs

 private:
  const Endpoint& own_;
  std::string nics() const;
  std::string attach(const AttachRequest& request);
  // When it returns, nothing lands any more.
  std::string detach(const DetachRequest& request);
  // For the regions that contain these addresses: no address is revealed to a peer that does not
  // know it.
  std::string keys(const std::vector<uint64_t>& addresses) const;
  // Waits for an immediate on each. The arrival of a write is certain by that of what follows it.
  std::string flush(const std::vector<uint32_t>& rails, const Limit& limit);

  struct Rail {
    std::shared_ptr<rdma::CompletionQueue> queue;
    std::shared_ptr<rdma::QueuePair> pair;
  };
  std::map<uint32_t, Rail> rails_;
};

}  // namespace mk::transfer
