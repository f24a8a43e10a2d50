// RdmaTarget: what a session does for an initiator that comes with NICs: tells ours and the keys of
// our regions, and connects queue pairs to its own. From then on the initiator's NIC moves the data
// alone, until the queue pair ends: with the session at the latest.
//
// Layer: transfer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "rdma/queue_pair.h"
#include "transfer/endpoint.h"
#include "transfer/nic_wire.h"

namespace mk::transfer {

class RdmaTarget {
 public:
  explicit RdmaTarget(const Endpoint& own) : own_(own) {}

  // Answers, as bytes. All may throw Refused.
  std::string nics() const;
  std::string attach(const AttachRequest& request);
  std::string detach(const DetachRequest& request);  // when it returns, nothing lands any more
  std::string keys() const;

  void close() noexcept;  // all queue pairs

 private:
  const Endpoint& own_;
#if MK_HAVE_VERBS
  std::map<uint32_t, std::shared_ptr<rdma::QueuePair>> rails_;
#endif
};

}  // namespace mk::transfer
