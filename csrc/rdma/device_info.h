// What verbs report about this machine's NICs: ports, GIDs, limits.
//
//   for (const DeviceInfo& info : list_devices()) ...
//
// Layer: rdma. What verbs do not report (NUMA node, PCI path, rate) comes from sysfs:
// mooncake_kernels/rdma.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "rdma/verbs.h"

namespace mk::rdma {

using Gid = std::array<uint8_t, 16>;

struct GidInfo {
  int index = 0;
  Gid gid{};
  std::string type;        // "IB", "RoCE v1", "RoCE v2"; empty if the library cannot tell
  uint32_t interface = 0;  // index of its network interface; 0 if it has none
};

struct PortInfo {
  int number = 0;
  std::string state;       // "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER", "NOP"
  std::string link_layer;  // "InfiniBand", "Ethernet", "Unspecified"
  int active_mtu = 0;      // bytes
  int max_mtu = 0;
  uint32_t max_message_bytes = 0;
  int lid = 0;
  std::vector<GidInfo> gids;  // the ones that are set
};

struct DeviceInfo {
  std::string name;
  std::string node_type;  // as in sysfs: "CA", "RNIC", "usNIC", "unspecified", ...; empty: unknown
  uint64_t node_guid = 0;
  std::string firmware;
  uint32_t vendor_id = 0;
  uint64_t max_mr_bytes = 0;
  int max_mr = 0, max_qp = 0, max_qp_wr = 0, max_sge = 0, max_sge_read = 0, max_cq = 0, max_cqe = 0;
  int max_reads_in = 0, max_reads_out = 0;  // RDMA reads in flight per queue pair
  std::vector<PortInfo> ports;
};

// Why a device has no queue pairs that two of them could connect by exchanging their numbers; empty
// if it has, or its node type is not known.
std::string why_unusable(const std::string& node_type, uint32_t pci_vendor);

// Leaves out a device that cannot be asked; opening it says why. Throws Unavailable (no
// libibverbs), and SystemError if none can be asked, unless they have all disappeared meanwhile.
std::vector<DeviceInfo> list_devices();

DeviceInfo describe(ibv_context* context);
PortInfo describe_port(ibv_context* context, int port);

}  // namespace mk::rdma
