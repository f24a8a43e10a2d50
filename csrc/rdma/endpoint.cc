#include "rdma/endpoint.h"

#include <algorithm>

#include "common/check.h"

namespace mk::rdma {
namespace {

// A lower rank has a wider reach.
int rank(const GidInfo& info) {
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  const bool is_ipv4 = std::equal(kMapped, kMapped + 12, info.gid.begin());
  const bool is_link_local = is_ipv4 ? info.gid[12] == 169 && info.gid[13] == 254
                                     : info.gid[0] == 0xfe && (info.gid[1] & 0xc0) == 0x80;
  return (info.type == "RoCE v2" ? 0 : 4) + (is_link_local ? 2 : is_ipv4 ? 0 : 1);
}

}  // namespace

GidInfo choose_gid(const std::string& device, const PortInfo& port) {
  if (port.gids.empty()) {
    throw Unavailable(concat("queue_pair: ", device, " port ", port.number, " (", port.state,
                             ") has no GID: is its network interface up, with an address?"));
  }
  if (port.link_layer == "InfiniBand") return port.gids.front();
  return *std::min_element(port.gids.begin(), port.gids.end(),
                           [](const GidInfo& a, const GidInfo& b) { return rank(a) < rank(b); });
}

void check_compatible(const Endpoint& local, const Endpoint& peer) {
  MK_CHECK(peer.link_layer == local.link_layer, "connect: peer must be on ", local.link_layer,
           " like this port, got ", peer.link_layer);
  const bool same_type = peer.gid_type == local.gid_type || local.gid_type.empty() ||
                         peer.gid_type.empty() || local.link_layer == "InfiniBand";
  MK_CHECK(same_type, "connect: peer must have a GID of type ", local.gid_type,
           " like this port, got ", peer.gid_type, ": choose another gid_index on one side");
  MK_CHECK(peer.mtu >= 256 && peer.mtu <= 4096 && (peer.mtu & (peer.mtu - 1)) == 0,
           "connect: peer must have an MTU of 256 to 4096, got ", peer.mtu);
  MK_CHECK(peer.qp_num < (1u << 24) && peer.psn < (1u << 24),
           "connect: peer must have numbers of 24 bits, got queue pair ", peer.qp_num,
           " and packet ", peer.psn);
}

}  // namespace mk::rdma
