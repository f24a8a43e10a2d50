// NICs: listed, opened, asked. And what happens to them.
#include <endian.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "control.h"
#include "world.h"

namespace fake {
namespace {

// Of calls that concern no device.
const Model& no_model() {
  static const Model model;
  return model;
}

Port* find_port(const ibv_context* context, int number) {
  auto& ports = model_of(context).ports;
  return number >= 1 && number <= static_cast<int>(ports.size()) ? &ports[number - 1] : nullptr;
}

int query_port(ibv_context* context, uint8_t number, ibv_port_attr* attr, size_t size) {
  if (const int error = enter("ibv_query_port", model_of(context))) return error;
  const Lock lock(world().mutex);
  const Port* port = find_port(context, number);
  if (!port || !is_live(context, "context", "ibv_query_port")) return EINVAL;
  ibv_port_attr whole = port->attr;
  whole.gid_tbl_len = static_cast<int>(port->gids.size());
  std::memcpy(attr, &whole, std::min(size, sizeof whole));
  return 0;
}

bool is_of_qp(const ibv_async_event& event) {
  return event.event_type >= IBV_EVENT_QP_FATAL && event.event_type <= IBV_EVENT_PATH_MIG_ERR;
}

}  // namespace

Context* context_of(const ibv_context* context) {
  const auto* bytes = reinterpret_cast<const char*>(context) - offsetof(verbs_context, context);
  return reinterpret_cast<Context*>(const_cast<char*>(bytes));
}
Model& model_of(const ibv_context* context) { return *context_of(context)->model; }

void push_event(Context* context, const ibv_async_event& event) {
  context->events.push_back(event);
  eventfd_write(context->verbs.context.async_fd, 1);
}

}  // namespace fake

using namespace fake;

extern "C" {

ibv_device** ibv_get_device_list(int* count) {
  if (const int error = enter("ibv_get_device_list", no_model())) {
    return refuse<ibv_device*>(error);
  }
  const Lock lock(world().mutex);
  auto** list = new ibv_device* [world().models.size() + 1] {};
  for (size_t i = 0; i < world().models.size(); ++i) list[i] = &world().models[i]->device;
  world().live[list] = "device list";
  *count = static_cast<int>(world().models.size());
  return list;
}

void ibv_free_device_list(ibv_device** list) {
  const Lock lock(world().mutex);
  if (!is_live(list, "device list", "ibv_free_device_list")) return;
  world().live.erase(list);
  delete[] list;
}

const char* ibv_get_device_name(ibv_device* device) { return device->name; }

__be64 ibv_get_device_guid(ibv_device* device) {
  return htobe64(reinterpret_cast<Model*>(device)->guid);
}

ibv_context* ibv_open_device(ibv_device* device) {
  auto* model = reinterpret_cast<Model*>(device);
  if (const int error = enter("ibv_open_device", *model)) return refuse<ibv_context>(error);
  const Lock lock(world().mutex);
  if (model->is_gone) return refuse<ibv_context>(ENODEV);
  auto* context = new Context{};
  context->model = model;
  ibv_context* handle = &context->verbs.context;
  handle->device = device;
  handle->cmd_fd = -1;
  handle->async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  set_data_path(handle);
#ifndef FAKE_OLD
  context->verbs.sz = sizeof context->verbs;
  context->verbs.query_port = &query_port;
  handle->abi_compat = __VERBS_ABI_IS_EXTENDED;
#endif
  world().live[handle] = "context";
  return handle;
}

int ibv_close_device(ibv_context* context) {
  if (const int error = enter("ibv_close_device", model_of(context))) return error;
  const Lock lock(world().mutex);
  if (!is_live(context, "context", "ibv_close_device")) return EINVAL;
  size_t num_left = 0;
  for (const auto& [handle, kind] : world().live) {
    // All other handles begin with their context.
    if (kind == "context" || kind == "device list") continue;
    num_left += *static_cast<ibv_context* const*>(handle) == context;
  }
  if (num_left > 0) protest(concat("ibv_close_device: ", num_left, " handles are alive"));
  world().live.erase(context);
  close(context->async_fd);
  delete context_of(context);
  return 0;
}

int ibv_query_device(ibv_context* context, ibv_device_attr* attr) {
  if (const int error = enter("ibv_query_device", model_of(context))) return error;
  const Lock lock(world().mutex);
  *attr = model_of(context).attr;
  return 0;
}

int ibv_query_port(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attr) {
  // As long as the structure was when that symbol got its version.
  constexpr size_t size = offsetof(ibv_port_attr, port_cap_flags2);
  return query_port(context, port, reinterpret_cast<ibv_port_attr*>(attr), size);
}

int ibv_query_gid(ibv_context* context, uint8_t number, int index, ibv_gid* gid) {
  if (const int error = enter("ibv_query_gid", model_of(context))) return errno = error, -1;
  const Lock lock(world().mutex);
  const Port* port = find_port(context, number);
  if (!port || index >= static_cast<int>(port->gids.size())) return errno = EINVAL, -1;
  *gid = port->gids[index].gid;
  return 0;
}

#ifndef FAKE_OLD
int ibv_fork_init() { return enter("ibv_fork_init", no_model(), "children=all"); }

ibv_fork_status ibv_is_fork_initialized() {
  const Lock lock(world().mutex);
  return static_cast<ibv_fork_status>(world().options["fork_status"]);
}

int _ibv_query_gid_ex(ibv_context* context, uint32_t number, uint32_t index, ibv_gid_entry* entry,
                      uint32_t, size_t size) {
  if (const int error = enter("ibv_query_gid_ex", model_of(context))) return error;
  const Lock lock(world().mutex);
  const Port* port = find_port(context, static_cast<int>(number));
  if (!port || index >= port->gids.size()) return EINVAL;
  constexpr ibv_gid kUnset{};
  if (!std::memcmp(&port->gids[index].gid, &kUnset, sizeof kUnset)) return ENODATA;
  std::memcpy(entry, &port->gids[index], size);
  return 0;
}
#endif

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  if (const int error = enter("ibv_get_async_event", model_of(context))) return errno = error, -1;
  eventfd_t count;
  if (eventfd_read(context->async_fd, &count) != 0) return -1;
  const Lock lock(world().mutex);
  auto& events = context_of(context)->events;
  if (events.empty()) return errno = EAGAIN, -1;  // it was of what is destroyed
  *event = events.front();
  events.pop_front();
  return 0;
}

void ibv_ack_async_event(ibv_async_event* event) {
  const Lock lock(world().mutex);
  if (is_of_qp(*event)) is_live(event->element.qp, "queue pair", "ibv_ack_async_event");
}

void fake_inject_event(const char* device, int type, int port, uint32_t qp_num) {
  const Lock lock(world().mutex);
  ibv_async_event event{};
  event.event_type = static_cast<ibv_event_type>(type);
  event.element.port_num = port;
  for (Qp* qp : world().qps) {
    const bool same = model_of(qp->context).device.name == std::string(device);
    if (is_of_qp(event) && same && qp->qp_num == qp_num) event.element.qp = qp;
  }
  for (const auto& [handle, kind] : world().live) {
    if (kind != "context") continue;
    auto* context = context_of(static_cast<const ibv_context*>(handle));
    if (context->model->device.name == std::string(device)) push_event(context, event);
  }
}

}  // extern "C"
