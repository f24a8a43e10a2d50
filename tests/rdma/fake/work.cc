// What NICs do with work requests: they run in the order they were posted, when the peer can take
// them, and end with what verbs say of each mistake.
#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "world.h"

namespace fake {
namespace {

// The port that a queue pair sends to; none if no one has that address.
const Port* find_destination(const Qp& qp, const ibv_qp_attr& attr, const Model** found) {
  for (const auto& model : world().models) {
    for (const Port& port : model->ports) {
      const auto has = [&](const ibv_gid_entry& entry) {
        return !std::memcmp(&entry.gid, &attr.ah_attr.grh.dgid, sizeof entry.gid);
      };
      const bool by_gid = std::any_of(port.gids.begin(), port.gids.end(), has);
      if (attr.ah_attr.is_global ? !by_gid : port.attr.lid != attr.ah_attr.dlid) continue;
      *found = model.get();
      return &port;
    }
  }
  return nullptr;
}

// The other end, if it is connected to this one and the way is open.
Qp* find_peer(const Qp& qp) {
  const Model* model = nullptr;
  const Port* port = find_destination(qp, qp.attr, &model);
  const Port& own = model_of(qp.context).ports[qp.port - 1];
  if (!port || port->attr.state != IBV_PORT_ACTIVE || own.attr.state != IBV_PORT_ACTIVE) {
    return nullptr;
  }
  for (Qp* peer : world().qps) {
    const bool same = &model_of(peer->context) == model && peer->qp_num == qp.attr.dest_qp_num;
    const bool ready = peer->state == IBV_QPS_RTR || peer->state == IBV_QPS_RTS;
    if (same && ready && peer->attr.dest_qp_num == qp.qp_num &&
        peer->attr.rq_psn == qp.attr.sq_psn) {
      return peer;
    }
  }
  return nullptr;
}

// Where the NIC reads or writes; null without the right.
char* find_memory(const ibv_pd* pd, uint32_t key, bool remote, uint64_t address, uint64_t num_bytes,
                  unsigned access) {
  for (const Mr* mr : world().mrs) {
    const bool same = mr->pd == pd && (remote ? mr->rkey : mr->lkey) == key;
    if (!same || (mr->access & access) != access) continue;
    const bool inside = address >= mr->iova && num_bytes <= mr->length &&
                        address - mr->iova <= mr->length - num_bytes;
    if (inside) return mr->memory + (address - mr->iova);
  }
  return nullptr;
}

std::optional<ibv_wc_status> injected() {
  for (auto rule = world().work_rules.begin(); rule != world().work_rules.end(); ++rule) {
    if (rule->skip-- > 0) continue;
    const ibv_wc_status status = rule->status;
    world().work_rules.erase(rule);
    return status;
  }
  return std::nullopt;
}

void move_bytes(const Qp& qp, const Send& send, const std::vector<char*>& local, char* remote) {
  const bool reads = send.opcode == IBV_WR_RDMA_READ;
  char* at = remote;
  for (size_t i = 0; i < local.size(); ++i) {
    std::memmove(reads ? local[i] : at, reads ? at : local[i], send.parts[i].length);
    at += send.parts[i].length;
  }
  if (!reads && at != remote && world().options["corrupt"]) *remote ^= 1;
}

void take_receive(Qp* peer, const Send& send, uint64_t num_bytes) {
  Entry entry{{}, peer, 0};
  entry.wc.wr_id = peer->receives.front();
  peer->receives.pop_front();
  entry.wc.qp_num = peer->qp_num;
  entry.wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  entry.wc.wc_flags = IBV_WC_WITH_IMM;
  entry.wc.imm_data = send.immediate;
  entry.wc.byte_len = static_cast<uint32_t>(num_bytes);
  push_entry(peer->recv_cq, entry);
}

// What it ends with; nothing if it must wait for a receive of the peer.
std::optional<ibv_wc_status> run(const Qp* qp, const Send& send, Qp* peer) {
  if (!peer) return IBV_WC_RETRY_EXC_ERR;
  const bool reads = send.opcode == IBV_WR_RDMA_READ;
  const bool has_immediate = send.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  std::vector<char*> local;
  uint64_t num_bytes = 0;
  for (const ibv_sge& part : send.parts) {
    local.push_back(find_memory(qp->pd, part.lkey, false, part.addr, part.length,
                                reads ? IBV_ACCESS_LOCAL_WRITE : 0));
    if (!local.back()) return IBV_WC_LOC_PROT_ERR;
    num_bytes += part.length;
  }
  if (num_bytes > model_of(qp->context).ports[qp->port - 1].attr.max_msg_sz) {
    return IBV_WC_LOC_LEN_ERR;
  }
  const unsigned right = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  char* remote = nullptr;
  if (num_bytes > 0) {
    remote = find_memory(peer->pd, send.rkey, true, send.remote, num_bytes, right);
    if (!remote || !(peer->attr.qp_access_flags & right)) return IBV_WC_REM_ACCESS_ERR;
  }
  if (has_immediate && peer->receives.empty()) {
    if (qp->attr.rnr_retry == 7) return std::nullopt;
    return IBV_WC_RNR_RETRY_EXC_ERR;
  }
  if (const auto status = injected()) return status;
  move_bytes(*qp, send, local, remote);
  if (has_immediate) take_receive(peer, send, num_bytes);
  return IBV_WC_SUCCESS;
}

void end_send(Qp* qp, const Send& send, ibv_wc_status status) {
  ++qp->num_unsignaled;
  if (status == IBV_WC_SUCCESS && !send.is_signaled) return;
  Entry entry{{}, qp, qp->num_unsignaled};
  qp->num_unsignaled = 0;
  entry.wc.wr_id = send.wr_id;
  entry.wc.status = status;
  entry.wc.qp_num = qp->qp_num;
  const bool ok = status == IBV_WC_SUCCESS;
  entry.wc.opcode = ok ? IBV_WC_RDMA_WRITE : IBV_WC_BIND_MW;  // of a failure it says nothing
  entry.wc.vendor_err = ok ? 0 : 0x80 + status;
  push_entry(qp->send_cq, entry);
}

// The answering end fails, too.
void refuse_access(Qp* peer) {
  to_error(peer);
  ibv_async_event event{};
  event.event_type = IBV_EVENT_QP_ACCESS_ERR;
  event.element.qp = peer;
  push_event(context_of(peer->context), event);
}

bool is_stalled(const Qp& qp) {
  const int64_t stalled = world().options["stalled"];
  for (size_t i = 0; i < world().models.size(); ++i) {
    if (world().models[i].get() == &model_of(qp.context)) return stalled >> i & 1;
  }
  return false;
}

// Runs the first of them; whether there was one, and it could.
bool run_first(Qp* qp) {
  if (qp->state != IBV_QPS_RTS || qp->sends.empty() || is_stalled(*qp)) return false;
  const Send send = qp->sends.front();
  if (send.done_at > Clock::now()) return false;
  Qp* const peer = find_peer(*qp);
  const auto status = run(qp, send, peer);
  if (!status) return false;
  qp->sends.pop_front();
  end_send(qp, send, *status);
  if (*status != IBV_WC_SUCCESS) to_error(qp);
  if (*status == IBV_WC_REM_ACCESS_ERR && peer) refuse_access(peer);
  if (world().budget > 0) --world().budget;
  return true;
}

// For ever, in a thread of its own: what NICs with a speed have moved meanwhile.
void run_when_done() {
  Lock lock(world().mutex);
  for (;;) {
    run_work();
    const Clock::time_point now = Clock::now();
    Clock::time_point next = Clock::time_point::max();
    for (const Qp* qp : world().qps) {
      if (!qp->sends.empty() && qp->sends.front().done_at > now) {
        next = std::min(next, qp->sends.front().done_at);
      }
    }
    if (next == Clock::time_point::max()) {
      world().is_posted.wait(lock);
    } else {
      world().is_posted.wait_until(lock, next);
    }
  }
}

}  // namespace

int check_route(const Qp& qp, const ibv_qp_attr& attr) {
  const Model* model = nullptr;
  return find_destination(qp, attr, &model) ? 0 : EHOSTUNREACH;
}

// What is posted is flushed, each with a completion.
void to_error(Qp* qp) {
  qp->state = IBV_QPS_ERR;
  for (; !qp->sends.empty(); qp->sends.pop_front()) {
    end_send(qp, qp->sends.front(), IBV_WC_WR_FLUSH_ERR);
  }
  for (; !qp->receives.empty(); qp->receives.pop_front()) {
    Entry entry{{}, qp, 0};
    entry.wc.wr_id = qp->receives.front();
    entry.wc.status = IBV_WC_WR_FLUSH_ERR;
    entry.wc.qp_num = qp->qp_num;
    push_entry(qp->recv_cq, entry);
  }
}

void run_work() {
  for (bool any = true; any;) {
    any = false;
    for (Qp* qp : world().qps) {
      while (world().budget != 0 && run_first(qp)) any = true;
    }
  }
}

void run_work_in_time() {
  static std::once_flag once;
  std::call_once(once, [] { std::thread(&run_when_done).detach(); });
}

}  // namespace fake
