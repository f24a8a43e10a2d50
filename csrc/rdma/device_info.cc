#include "rdma/device_info.h"

#include <endian.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>

#include "rdma/device_list.h"
#include "rdma/error.h"

namespace mk::rdma {
namespace {

const char* state_name(ibv_port_state state) {
  static const char* const names[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"};
  return state >= 0 && state <= IBV_PORT_ACTIVE_DEFER ? names[state] : "UNKNOWN";
}

// The kernel's names, in /sys/class/infiniband/<name>/node_type.
const char* node_type_name(int type) {
  static const char* const names[] = {"",     "CA",    "switch",    "router",
                                      "RNIC", "usNIC", "usNIC UDP", "unspecified"};
  return type >= IBV_NODE_CA && type <= IBV_NODE_UNSPECIFIED ? names[type] : "";
}

const char* link_layer_name(uint8_t link_layer) {
  if (link_layer == IBV_LINK_LAYER_INFINIBAND) return "InfiniBand";
  return link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "Unspecified";
}

const char* gid_type_name(uint32_t type) {
  static const char* const names[] = {"IB", "RoCE v1", "RoCE v2"};
  return type <= IBV_GID_TYPE_ROCE_V2 ? names[type] : "";
}

int mtu_bytes(ibv_mtu mtu) { return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128 << mtu : 0; }

// ibv_query_port of verbs.h is inline and would link the library.
int query_port(ibv_context* context, int port, ibv_port_attr* attr) {
  std::memset(attr, 0, sizeof *attr);
  if (verbs_context* verbs = verbs_get_ctx_op(context, query_port)) {
    return verbs->query_port(context, port, attr, sizeof *attr);
  }
  return Verbs::get().p_ibv_query_port(context, port,
                                       reinterpret_cast<_compat_ibv_port_attr*>(attr));
}

// Whether the table entry is set.
bool query_gid(ibv_context* context, int port, int index, GidInfo* info) {
  info->index = index;
  ibv_gid gid{};
  if (VerbsGid::reason().empty()) {
    ibv_gid_entry entry{};
    if (VerbsGid::get().p__ibv_query_gid_ex(context, port, index, &entry, 0, sizeof entry) != 0) {
      return false;
    }
    gid = entry.gid;
    info->type = gid_type_name(entry.gid_type);
    info->interface = entry.ndev_ifindex;
  } else if (Verbs::get().p_ibv_query_gid(context, port, index, &gid) != 0) {
    return false;
  }
  std::memcpy(info->gid.data(), gid.raw, sizeof gid.raw);
  return info->gid != Gid{};
}

}  // namespace

PortInfo describe_port(ibv_context* context, int port) {
  ibv_port_attr attr;
  check_verb(query_port(context, port, &attr), "ibv_query_port",
             concat(Verbs::get().p_ibv_get_device_name(context->device), " port ", port));
  PortInfo info;
  info.number = port;
  info.state = state_name(attr.state);
  info.link_layer = link_layer_name(attr.link_layer);
  info.active_mtu = mtu_bytes(attr.active_mtu);
  info.max_mtu = mtu_bytes(attr.max_mtu);
  info.max_message_bytes = attr.max_msg_sz;
  info.lid = attr.lid;
  for (int i = 0; i < attr.gid_tbl_len; ++i) {
    GidInfo gid;
    if (query_gid(context, port, i, &gid)) info.gids.push_back(gid);
  }
  return info;
}

std::string why_unusable(const std::string& node_type, uint32_t pci_vendor) {
  constexpr uint32_t kAmazon = 0x1d0f;
  if (pci_vendor == kAmazon) return "EFA: it has no RC queue pairs";
  if (node_type == "RNIC") return "iWARP: its queue pairs connect by rdma_cm alone";
  for (const char* other : {"switch", "router", "usNIC", "usNIC UDP", "unspecified"}) {
    if (node_type == other) return concat("node type ", other, ": it has no RC queue pairs");
  }
  return "";
}

DeviceInfo describe(ibv_context* context) {
  const Verbs& verbs = Verbs::get();
  DeviceInfo info;
  info.name = verbs.p_ibv_get_device_name(context->device);
  ibv_device_attr attr{};
  check_verb(verbs.p_ibv_query_device(context, &attr), "ibv_query_device", info.name);
  int node_type;  // a later library may know others, which the enumeration cannot hold
  static_assert(sizeof(node_type) == sizeof(context->device->node_type));
  std::memcpy(&node_type, &context->device->node_type, sizeof(node_type));
  info.node_type = node_type_name(node_type);
  info.node_guid = be64toh(verbs.p_ibv_get_device_guid(context->device));
  info.firmware.assign(attr.fw_ver, strnlen(attr.fw_ver, sizeof attr.fw_ver));
  info.vendor_id = attr.vendor_id;
  info.max_mr_bytes = attr.max_mr_size;
  info.max_mr = attr.max_mr;
  info.max_qp = attr.max_qp;
  info.max_qp_wr = attr.max_qp_wr;
  info.max_sge = attr.max_sge;
  info.max_sge_read = attr.max_sge_rd > 0 ? std::min(attr.max_sge_rd, attr.max_sge) : attr.max_sge;
  info.max_cq = attr.max_cq;
  info.max_cqe = attr.max_cqe;
  info.max_reads_in = attr.max_qp_rd_atom;
  info.max_reads_out = attr.max_qp_init_rd_atom;
  for (int port = 1; port <= attr.phys_port_cnt; ++port) {
    info.ports.push_back(describe_port(context, port));
  }
  return info;
}

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> infos;
  std::exception_ptr first_error;
  const DeviceList devices;
  for (ibv_device* device : devices) {
    try {
      const ContextHandle context(Verbs::get().p_ibv_open_device(device));
      check_handle(context.get(), "ibv_open_device", Verbs::get().p_ibv_get_device_name(device));
      infos.push_back(describe(context.get()));
    } catch (const SystemError& error) {
      if (!first_error && error.code().value() != ENODEV) first_error = std::current_exception();
    }
  }
  if (infos.empty() && first_error) std::rethrow_exception(first_error);
  return infos;
}

}  // namespace mk::rdma
