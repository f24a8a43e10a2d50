// Completion queues, and the channels that tell of them.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <tuple>

#include "control.h"
#include "world.h"

namespace fake {

int poll_cq(ibv_cq* handle, int count, ibv_wc* wcs) {
  if (enter("ibv_poll_cq", model_of(handle->context))) return -1;
  const Lock lock(world().mutex);
  if (!is_live(handle, "completion queue", "ibv_poll_cq")) return -1;
  auto& entries = static_cast<Cq*>(handle)->entries;
  int got = 0;
  for (; got < count && !entries.empty(); ++got) {
    const Entry& entry = entries.front();
    wcs[got] = entry.wc;
    if (entry.qp) entry.qp->num_used -= entry.num_freed;
    entries.pop_front();
  }
  return got;
}

int req_notify_cq(ibv_cq* handle, int) {
  if (const int error = enter("ibv_req_notify_cq", model_of(handle->context))) return error;
  const Lock lock(world().mutex);
  if (!is_live(handle, "completion queue", "ibv_req_notify_cq")) return EINVAL;
  static_cast<Cq*>(handle)->is_armed = true;
  return 0;
}

void push_entry(ibv_cq* handle, Entry entry) {
  auto* cq = static_cast<Cq*>(handle);
  if (static_cast<int>(cq->entries.size()) >= cq->cqe) {
    protest(concat("a completion queue of ", cq->cqe, " entries is overrun"));
    return;
  }
  cq->entries.push_back(entry);
  if (!cq->is_armed || !cq->channel) return;
  cq->is_armed = false;
  ++cq->num_events;
  static_cast<Channel*>(cq->channel)->events.push_back(cq);
  eventfd_write(cq->channel->fd, 1);
}

}  // namespace fake

using namespace fake;

extern "C" {

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  if (const int error = enter("ibv_create_comp_channel", model_of(context))) {
    return refuse<ibv_comp_channel>(error);
  }
  const Lock lock(world().mutex);
  auto* channel = new Channel{};
  channel->context = context;
  channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  world().live[channel] = "channel";
  return channel;
}

int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  if (const int error = enter("ibv_destroy_comp_channel", model_of(channel->context))) {
    return error;
  }
  const Lock lock(world().mutex);
  if (!is_live(channel, "channel", "ibv_destroy_comp_channel")) return EINVAL;
  if (channel->refcnt > 0) return protest("ibv_destroy_comp_channel: queues are alive"), EBUSY;
  close(channel->fd);
  world().live.erase(channel);
  delete static_cast<Channel*>(channel);
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int depth, void* cq_context, ibv_comp_channel* channel,
                      int) {
  if (const int error = enter("ibv_create_cq", model_of(context), concat("depth=", depth))) {
    return refuse<ibv_cq>(error);
  }
  const Lock lock(world().mutex);
  if (depth < 1 || depth > model_of(context).attr.max_cqe) return refuse<ibv_cq>(EINVAL);
  if (!is_live(context, "context", "ibv_create_cq")) return refuse<ibv_cq>(EINVAL);
  auto* cq = new Cq{};
  cq->context = context;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->cqe = depth;
  if (channel) ++channel->refcnt;
  world().live[cq] = "completion queue";
  return cq;
}

int ibv_destroy_cq(ibv_cq* handle) {
  if (const int error = enter("ibv_destroy_cq", model_of(handle->context))) return error;
  const Lock lock(world().mutex);
  if (!is_live(handle, "completion queue", "ibv_destroy_cq")) return EINVAL;
  auto* cq = static_cast<Cq*>(handle);
  const auto& qps = world().qps;
  if (std::any_of(qps.begin(), qps.end(), [&](const Qp* qp) { return qp->send_cq == cq; })) {
    return protest("ibv_destroy_cq: queue pairs are alive"), EBUSY;
  }
  auto& events = static_cast<Channel*>(cq->channel)->events;
  cq->num_events -= std::count(events.begin(), events.end(), cq);  // taken by no one
  events.erase(std::remove(events.begin(), events.end(), cq), events.end());
  if (cq->num_acknowledged != cq->num_events) {
    protest("ibv_destroy_cq: would wait for ever for events that are not acknowledged");
  }
  --cq->channel->refcnt;
  world().live.erase(cq);
  delete cq;
  return 0;
}

int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** context) {
  if (const int error = enter("ibv_get_cq_event", model_of(channel->context))) {
    return errno = error, -1;
  }
  eventfd_t count;
  if (eventfd_read(channel->fd, &count) != 0) return -1;
  const Lock lock(world().mutex);
  auto& events = static_cast<Channel*>(channel)->events;
  if (events.empty()) return errno = EAGAIN, -1;
  *cq = events.front();
  *context = events.front()->cq_context;
  events.pop_front();
  return 0;
}

int64_t fake_count_entries(const char* device) {
  const Lock lock(world().mutex);
  int64_t count = 0;
  for (const auto& [handle, kind] : world().live) {
    if (kind != "completion queue") continue;
    const auto* cq = static_cast<const Cq*>(static_cast<const ibv_cq*>(handle));
    if (model_of(cq->context).device.name == std::string(device)) {
      count += static_cast<int64_t>(cq->entries.size());
    }
  }
  return count;
}

void ibv_ack_cq_events(ibv_cq* cq, unsigned count) {
  const Lock lock(world().mutex);
  if (is_live(cq, "completion queue", "ibv_ack_cq_events")) {
    static_cast<Cq*>(cq)->num_acknowledged += count;
  }
}

}  // extern "C"
