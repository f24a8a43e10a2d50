// Endpoint: what the other side must know of a queue pair to connect to it, and which of a port's
// GIDs it is known by.
//
// Layer: rdma.
#pragma once

#include <cstdint>
#include <string>

#include "rdma/device_info.h"

#if MK_HAVE_VERBS
namespace mk::rdma {

struct Endpoint {
  uint32_t qp_num = 0;
  uint32_t psn = 0;  // 24 bits: number of its first packet
  uint16_t lid = 0;
  Gid gid{};
  std::string gid_type;    // as GidInfo::type
  std::string link_layer;  // as PortInfo::link_layer
  int mtu = 0;             // bytes
  int max_reads_in = 0;    // reads in flight that it answers
};

// The GID that reaches furthest: RoCE v2 before v1, and of an IPv4 address before a global IPv6
// before a link-local one; the first of a kind. On InfiniBand the first of the table.
// Throws Unavailable if the port has none.
GidInfo choose_gid(const std::string& device, const PortInfo& port);

// Throws InvalidArgument if the two cannot be connected, and why.
void check_compatible(const Endpoint& local, const Endpoint& peer);

}  // namespace mk::rdma
#endif
