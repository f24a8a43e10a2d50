#include "control.h"

#include <arpa/inet.h>

#include <cstring>

#include "world.h"

using namespace fake;

namespace {

ibv_gid_entry make_gid(int device, int port, int index, int type) {
  ibv_gid_entry entry{};
  const uint8_t raw[16] = {0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0xff,
                           0xff,
                           10,
                           0,
                           static_cast<uint8_t>(device),
                           static_cast<uint8_t>(port)};
  std::memcpy(entry.gid.raw, raw, sizeof raw);
  entry.gid_index = index;
  entry.port_num = port;
  entry.gid_type = type;
  entry.ndev_ifindex = device + 2;
  return entry;
}

void add_port(Model* model, int device) {
  Port port;
  port.attr.state = IBV_PORT_ACTIVE;
  port.attr.link_layer = IBV_LINK_LAYER_ETHERNET;
  port.attr.max_mtu = IBV_MTU_4096;
  port.attr.active_mtu = IBV_MTU_1024;
  port.attr.max_msg_sz = 1u << 30;
  model->ports.push_back(port);
  const int number = static_cast<int>(model->ports.size());
  for (int i = 0; i < 2; ++i) {
    const int type = i == 0 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
    model->ports.back().gids.push_back(make_gid(device, number, i, type));
  }
  model->attr.phys_port_cnt = static_cast<uint8_t>(number);
}

std::unique_ptr<Model> make_model(int index) {
  auto model = std::make_unique<Model>();
  std::strcpy(model->device.name, concat("fake", index).c_str());
  model->guid = 0x506b4b0300c26ae0 + index;
  ibv_device_attr& attr = model->attr;
  model->device.node_type = IBV_NODE_CA;
  std::strcpy(attr.fw_ver, "20.31.1014");
  attr.vendor_id = 0x02c9;
  attr.max_mr_size = UINT64_MAX;
  attr.max_mr = 1 << 16;
  attr.max_qp = 1 << 12;
  attr.max_qp_wr = 4096;
  attr.max_sge = 8;
  attr.max_sge_rd = 4;
  attr.max_cq = 1 << 12;
  attr.max_cqe = 1 << 16;
  attr.max_qp_rd_atom = attr.max_qp_init_rd_atom = 16;
  add_port(model.get(), index);
  return model;
}

// Writes to a field of any width.
template <class Field>
int put(Field* field, uint64_t value) {
  *field = static_cast<Field>(value);
  return 1;
}

}  // namespace

void fake_reset(int num_devices) {
  const Lock lock(world().mutex);
  World& w = world();
  // What was left alive keeps its NIC.
  for (auto& model : w.models) model.release();  // NOLINT: on purpose
  w.models.clear();
  for (int i = 0; i < num_devices; ++i) w.models.push_back(make_model(i));
  w.options = {{"keep_entries", 1}, {"fork_status", IBV_FORK_UNNEEDED}};
  w.rules.clear();
  w.num_met.clear();
  w.work_rules.clear();
  w.log.clear();
  w.errors.clear();
  w.budget = -1;
  fake_clear_calls();
}

#define FAKE_FIELD(name) \
  if (!std::strcmp(field, #name)) return put(&attr.name, value);

int fake_set_device(int device, const char* field, uint64_t value) {
  const Lock lock(world().mutex);
  Model& model = *world().models.at(device);
  ibv_device_attr& attr = model.attr;
  if (!std::strcmp(field, "is_gone")) return put(&model.is_gone, value);
  if (!std::strcmp(field, "node_type")) {
    model.device.node_type = static_cast<ibv_node_type>(value);
    return 1;
  }
  if (!std::strcmp(field, "bytes_per_s")) return run_work_in_time(), put(&model.bytes_per_s, value);
  FAKE_FIELD(vendor_id)
  FAKE_FIELD(max_mr_size)
  FAKE_FIELD(max_mr)
  FAKE_FIELD(max_qp)
  FAKE_FIELD(max_qp_wr)
  FAKE_FIELD(max_sge)
  FAKE_FIELD(max_sge_rd)
  FAKE_FIELD(max_cq)
  FAKE_FIELD(max_cqe)
  FAKE_FIELD(max_qp_rd_atom)
  FAKE_FIELD(max_qp_init_rd_atom)
  return 0;
}

int fake_set_port(int device, int port, const char* field, uint64_t value) {
  const Lock lock(world().mutex);
  ibv_port_attr& attr = world().models.at(device)->ports.at(port - 1).attr;
  FAKE_FIELD(lid)
  FAKE_FIELD(link_layer)
  FAKE_FIELD(max_msg_sz)
  if (!std::strcmp(field, "state")) return attr.state = static_cast<ibv_port_state>(value), 1;
  if (!std::strcmp(field, "active_mtu")) return attr.active_mtu = static_cast<ibv_mtu>(value), 1;
  return 0;
}

void fake_add_port(int device) {
  const Lock lock(world().mutex);
  add_port(world().models.at(device).get(), device);
}

void fake_set_gid(int device, int port, int index, const uint8_t* gid, int type, int interface) {
  const Lock lock(world().mutex);
  auto& gids = world().models.at(device)->ports.at(port - 1).gids;
  if (gids.size() <= static_cast<size_t>(index)) gids.resize(index + 1);
  gids[index] = make_gid(device, port, index, type);
  gids[index].ndev_ifindex = interface;
  std::memcpy(gids[index].gid.raw, gid, 16);
}

void fake_set_option(const char* name, int64_t value) {
  const Lock lock(world().mutex);
  world().options[name] = value;
}

void fake_add_rule(const char* verb, const char* device, int skip, int count, int error,
                   int delay_us, int meet) {
  const Lock lock(world().mutex);
  world().rules.push_back({verb, device, skip, count, error, delay_us, meet});
}

void fake_clear_rules() {
  const Lock lock(world().mutex);
  world().rules.clear();
  world().work_rules.clear();
}

void fake_fail_work(int skip, int status) {
  const Lock lock(world().mutex);
  world().work_rules.push_back({skip, static_cast<ibv_wc_status>(status)});
}

void fake_set_budget(int64_t num_work) {
  const Lock lock(world().mutex);
  world().budget = num_work;
  run_work();
}

int64_t fake_count_live(const char* kind) {
  const Lock lock(world().mutex);
  return static_cast<int64_t>(count_live(kind));
}

void fake_forget(const char* kind) {
  const Lock lock(world().mutex);
  auto& live = world().live;
  for (auto at = live.begin(); at != live.end();) at = at->second == kind ? live.erase(at) : ++at;
  if (kind == std::string("region")) world().mrs.clear();
}
