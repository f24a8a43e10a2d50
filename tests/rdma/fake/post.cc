// Work requests on their way into a queue pair.
#include <algorithm>

#include "world.h"

namespace fake {
namespace {

// When a NIC with a speed has moved it, after all that was posted to it before.
Clock::time_point done_at(Model* model, const Send& send) {
  if (model->bytes_per_s == 0) return {};
  uint64_t num_bytes = 0;
  for (const ibv_sge& part : send.parts) num_bytes += part.length;
  const std::chrono::duration<double> takes(static_cast<double>(num_bytes) / model->bytes_per_s);
  model->free_at =
      std::max(model->free_at, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
  return model->free_at;
}

int post_send(ibv_qp* handle, ibv_send_wr* wr, ibv_send_wr** bad) {
  // One call for each request, so that a rule can fail any of a chain.
  for (; wr; wr = wr->next) {
    *bad = wr;
    if (const int error = enter("ibv_post_send", model_of(handle->context))) return error;
    const Lock lock(world().mutex);
    if (!is_live(handle, "queue pair", "ibv_post_send")) return EINVAL;
    auto* qp = static_cast<Qp*>(handle);
    if (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_ERR) return EINVAL;
    const bool reads = wr->opcode == IBV_WR_RDMA_READ;
    const int most =
        reads ? std::min<int>(qp->cap.max_send_sge, model_of(qp->context).attr.max_sge_rd)
              : static_cast<int>(qp->cap.max_send_sge);
    if (wr->num_sge < 0 || wr->num_sge > most) return EINVAL;
    if (qp->num_used >= qp->cap.max_send_wr) return ENOMEM;
    ++qp->num_used;
    Send send{wr->wr_id,
              wr->opcode,
              (wr->send_flags & IBV_SEND_SIGNALED) != 0,
              {},
              wr->wr.rdma.remote_addr,
              wr->wr.rdma.rkey,
              wr->imm_data,
              {}};
    if (wr->num_sge > 0) send.parts.assign(wr->sg_list, wr->sg_list + wr->num_sge);
    send.done_at = done_at(&model_of(qp->context), send);
    qp->sends.push_back(std::move(send));
    if (qp->state == IBV_QPS_ERR) to_error(qp);
    run_work();
    world().is_posted.notify_one();
  }
  return 0;
}

int post_recv(ibv_qp* handle, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  *bad = wr;
  if (const int error = enter("ibv_post_recv", model_of(handle->context))) return error;
  const Lock lock(world().mutex);
  if (!is_live(handle, "queue pair", "ibv_post_recv")) return EINVAL;
  auto* qp = static_cast<Qp*>(handle);
  if (qp->state == IBV_QPS_RESET || wr->next) return EINVAL;
  if (qp->receives.size() >= qp->cap.max_recv_wr) return ENOMEM;
  qp->receives.push_back(wr->wr_id);
  if (qp->state == IBV_QPS_ERR) to_error(qp);
  run_work();
  return 0;
}

}  // namespace

void set_data_path(ibv_context* context) {
  context->ops.post_send = &post_send;
  context->ops.post_recv = &post_recv;
  context->ops.poll_cq = &poll_cq;
  context->ops.req_notify_cq = &req_notify_cq;
}

}  // namespace fake

extern "C" const char* ibv_wc_status_str(ibv_wc_status status) {
  static const char* const names[] = {"success",
                                      "local length error",
                                      "local QP operation error",
                                      "local EE context operation error",
                                      "local protection error",
                                      "Work Request Flushed Error",
                                      "memory management operation error",
                                      "bad response error",
                                      "local access error",
                                      "remote invalid request error",
                                      "remote access error",
                                      "remote operation error",
                                      "transport retry counter exceeded",
                                      "RNR retry counter exceeded",
                                      "local RDD violation error",
                                      "remote invalid RD request",
                                      "aborted error",
                                      "invalid EE context number",
                                      "invalid EE context state",
                                      "fatal error",
                                      "response timeout error",
                                      "general error"};
  return status >= 0 && status <= IBV_WC_GENERAL_ERR ? names[status] : "unknown";
}
