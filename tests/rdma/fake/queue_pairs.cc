// Queue pairs and their states: what verbs ask of each step, to the letter.
#include <algorithm>
#include <cstring>

#include "world.h"

namespace fake {
namespace {

constexpr int kToInit = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kToRtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                       IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kToRts = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

uint32_t unused_number(const ibv_context* context) {
  uint32_t number = 17;  // the smallest: numbers are given out again soon
  const auto is_used = [&](const Qp* qp) {
    return &model_of(qp->context) == &model_of(context) && qp->qp_num == number;
  };
  while (std::any_of(world().qps.begin(), world().qps.end(), is_used)) ++number;
  return number;
}

int to_init(Qp* qp, const ibv_qp_attr& attr, int mask) {
  const size_t num_ports = model_of(qp->context).ports.size();
  if (mask != kToInit || attr.port_num < 1 || attr.port_num > num_ports) return EINVAL;
  qp->port = attr.port_num;
  qp->attr = attr;
  return 0;
}

int to_rtr(Qp* qp, const ibv_qp_attr& attr, int mask) {
  const Model& model = model_of(qp->context);
  const Port& port = model.ports[qp->port - 1];
  const bool is_ethernet = port.attr.link_layer == IBV_LINK_LAYER_ETHERNET;
  const bool fits = attr.path_mtu >= IBV_MTU_256 && attr.path_mtu <= port.attr.active_mtu &&
                    attr.max_dest_rd_atomic <= model.attr.max_qp_rd_atom &&
                    attr.ah_attr.port_num == qp->port && attr.dest_qp_num < (1 << 24) &&
                    attr.rq_psn < (1 << 24) && (attr.ah_attr.is_global || !is_ethernet);
  if (mask != kToRtr || !fits) return EINVAL;
  if (attr.ah_attr.is_global && attr.ah_attr.grh.sgid_index >= port.gids.size()) return EINVAL;
  if (const int error = check_route(*qp, attr)) return error;
  const unsigned access = qp->attr.qp_access_flags;
  qp->attr = attr;
  qp->attr.qp_access_flags = access;
  return 0;
}

int to_rts(Qp* qp, const ibv_qp_attr& attr, int mask) {
  const bool fits = attr.timeout < 32 && attr.retry_cnt < 8 && attr.rnr_retry < 8 &&
                    attr.sq_psn < (1 << 24) &&
                    attr.max_rd_atomic <= model_of(qp->context).attr.max_qp_init_rd_atom;
  if (mask != kToRts || !fits) return EINVAL;
  qp->attr.timeout = attr.timeout;
  qp->attr.retry_cnt = attr.retry_cnt;
  qp->attr.rnr_retry = attr.rnr_retry;
  qp->attr.sq_psn = attr.sq_psn;
  qp->attr.max_rd_atomic = attr.max_rd_atomic;
  return 0;
}

int modify(Qp* qp, const ibv_qp_attr& attr, int mask) {
  if (attr.qp_state == IBV_QPS_RESET || attr.qp_state == IBV_QPS_ERR) {
    if (mask != IBV_QP_STATE) return EINVAL;
    if (attr.qp_state == IBV_QPS_RESET) stop_work(qp);
    if (attr.qp_state == IBV_QPS_ERR) to_error(qp);
  } else {
    int error = EINVAL;
    if (qp->state == IBV_QPS_RESET && attr.qp_state == IBV_QPS_INIT)
      error = to_init(qp, attr, mask);
    if (qp->state == IBV_QPS_INIT && attr.qp_state == IBV_QPS_RTR) error = to_rtr(qp, attr, mask);
    if (qp->state == IBV_QPS_RTR && attr.qp_state == IBV_QPS_RTS) error = to_rts(qp, attr, mask);
    if (error) return error;
  }
  qp->state = attr.qp_state;
  run_work();
  return 0;
}

}  // namespace

void stop_work(Qp* qp) {
  qp->sends.clear();
  qp->receives.clear();
  qp->num_used = qp->num_unsignaled = 0;
  auto& entries = static_cast<Cq*>(qp->send_cq)->entries;
  const auto is_of = [&](const Entry& entry) { return entry.qp == qp; };
  if (world().options["keep_entries"]) {
    for (Entry& entry : entries) entry.qp = is_of(entry) ? nullptr : entry.qp;
  } else {
    entries.erase(std::remove_if(entries.begin(), entries.end(), is_of), entries.end());
  }
}

}  // namespace fake

using namespace fake;

extern "C" {

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) {
  const std::string arguments =
      concat("max_send_wr=", attr->cap.max_send_wr, " max_recv_wr=", attr->cap.max_recv_wr,
             " max_send_sge=", attr->cap.max_send_sge);
  if (const int error = enter("ibv_create_qp", model_of(pd->context), arguments)) {
    return refuse<ibv_qp>(error);
  }
  const Lock lock(world().mutex);
  const ibv_device_attr& limits = model_of(pd->context).attr;
  if (!is_live(pd, "protection domain", "ibv_create_qp") ||
      !is_live(attr->send_cq, "completion queue", "ibv_create_qp") ||
      static_cast<int>(attr->cap.max_send_wr) > limits.max_qp_wr ||
      static_cast<int>(attr->cap.max_recv_wr) > limits.max_qp_wr ||
      static_cast<int>(attr->cap.max_send_sge) > limits.max_sge || attr->qp_type != IBV_QPT_RC) {
    return refuse<ibv_qp>(EINVAL);
  }
  const auto num_qps = std::count_if(world().qps.begin(), world().qps.end(), [&](const Qp* qp) {
    return &model_of(qp->context) == &model_of(pd->context);
  });
  if (num_qps >= limits.max_qp) return refuse<ibv_qp>(ENOMEM);
  auto* qp = new Qp{};
  qp->context = pd->context;
  qp->pd = pd;
  qp->send_cq = attr->send_cq;
  qp->recv_cq = attr->recv_cq;
  qp->state = IBV_QPS_RESET;
  qp->qp_type = attr->qp_type;
  qp->cap = attr->cap;
  qp->qp_num = unused_number(pd->context);
  world().live[qp] = "queue pair";
  world().qps.push_back(qp);
  return qp;
}

int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  const std::string arguments =
      concat("qp_num=", qp->qp_num, " state=", attr->qp_state, " path_mtu=", attr->path_mtu,
             " timeout=", int{attr->timeout}, " retry_cnt=", int{attr->retry_cnt},
             " traffic_class=", int{attr->ah_attr.grh.traffic_class},
             " sgid_index=", int{attr->ah_attr.grh.sgid_index},
             " is_global=", int{attr->ah_attr.is_global}, " sl=", int{attr->ah_attr.sl},
             " max_rd_atomic=", int{attr->max_rd_atomic});
  if (const int error = enter("ibv_modify_qp", model_of(qp->context), arguments)) return error;
  const Lock lock(world().mutex);
  if (!is_live(qp, "queue pair", "ibv_modify_qp")) return EINVAL;
  return modify(static_cast<Qp*>(qp), *attr, mask);
}

int ibv_destroy_qp(ibv_qp* handle) {
  if (const int error = enter("ibv_destroy_qp", model_of(handle->context))) return error;
  const Lock lock(world().mutex);
  if (!is_live(handle, "queue pair", "ibv_destroy_qp")) return EINVAL;
  auto* qp = static_cast<Qp*>(handle);
  stop_work(qp);
  auto& events = context_of(qp->context)->events;
  events.erase(std::remove_if(events.begin(), events.end(),
                              [&](const auto& event) { return event.element.qp == qp; }),
               events.end());
  world().qps.erase(std::find(world().qps.begin(), world().qps.end(), qp));
  world().live.erase(qp);
  delete qp;
  return 0;
}

}  // extern "C"
