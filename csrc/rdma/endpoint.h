// Endpoint: what the other side must know of a queue pair to connect to it; and the choice among a
// port's GIDs.
//
// Layer: rdma.
#pragma once

#include <cstdint>
#include <string>

#include "rdma/device_info.h"

namespace mk::rdma {

struct Endpoint {
  uint32_t qp_num = 0;
  uint32_t psn = 0;  // 24 bits: number of the first packet
  uint16_t lid = 0;
  Gid gid{};
  std::string gid_type;    // as GidInfo::type
  std::string link_layer;  // as PortInfo::link_layer
  int mtu = 0;             // bytes
  int max_reads_in = 0;    // reads in flight that it can answer
};

// The GID with the widest reach: RoCE v2 before v1, and an IPv4 address before a global IPv6 one
// before a link-local one; the first of its kind. On InfiniBand, the first in the table. Throws
// Unavailable if the port has none.
GidInfo choose_gid(const std::string& device, const PortInfo& port);

// Throws InvalidArgument, with the reason, if the two cannot be connected.
void check_compatible(const Endpoint& local, const Endpoint& peer);

}  // namespace mk::rdma
