#include "rdma/queue_pair.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "rdma/error.h"

namespace mk::rdma {
namespace {

constexpr int kMaxReads = 255;

int log2_of(int value) { return value <= 1 ? 0 : 1 + log2_of(value / 2); }
ibv_mtu mtu_code(int bytes) { return static_cast<ibv_mtu>(log2_of(bytes) - 7); }

void check_options(const QueuePairOptions& options, const DeviceInfo& info) {
  const std::string why_not = why_unusable(info.node_type, info.vendor_id);
  if (!why_not.empty()) throw Unavailable(concat("queue_pair: ", info.name, ": ", why_not));
  const auto check = [&](const char* name, int value, int low, int high) {
    MK_CHECK(value >= low && value <= high, "queue_pair: ", name, " must be in ", low, " to ", high,
             " on ", info.name, ", got ", value);
  };
  check("port", options.port, 1, static_cast<int>(info.ports.size()));
  check("max_sends", options.max_sends, 1, info.max_qp_wr);
  check("max_immediates", options.max_immediates, 0, info.max_qp_wr);
  check("max_sges", options.max_sges, 1, 1 << 20);
}

uint32_t random_psn() { return std::random_device{}() & 0xffffff; }

// For a port that does not report its maximum message size, the limit of verbs.
uint64_t message_bytes(const PortInfo& port) {
  constexpr uint64_t kMost = 1u << 30;
  return port.max_message_bytes == 0 ? kMost : std::min<uint64_t>(port.max_message_bytes, kMost);
}

// Of InfiniBand ports: packets to another subnet pass a router, which needs their GID.
bool is_same_subnet(const Endpoint& a, const Endpoint& b) {
  constexpr size_t kPrefixBytes = 8;
  return std::equal(a.gid.begin(), a.gid.begin() + kPrefixBytes, b.gid.begin());
}

GidInfo find_gid(const std::string& device, const PortInfo& port, int index) {
  if (index < 0) return choose_gid(device, port);
  for (const GidInfo& gid : port.gids) {
    if (gid.index == index) return gid;
  }
  throw InvalidArgument(concat("queue_pair: gid_index must be of a GID that is set on ", device,
                               " port ", port.number, ", got ", index));
}

}  // namespace

std::shared_ptr<QueuePair> QueuePair::make(std::shared_ptr<CompletionQueue> queue,
                                           const QueuePairOptions& options) {
  const Use use(*queue, "queue_pair");  // until it has joined the queue, too
  return make_resource<QueuePair>(queue, options);
}

QueuePair::QueuePair(std::shared_ptr<CompletionQueue> queue, const QueuePairOptions& options)
    : Resource("queue pair", {queue, queue->device()}),
      queue_(std::move(queue)),
      options_(options) {
  const Device& device = *queue_->device();
  check_options(options, device.info());
  const PortInfo port = device.port(options.port);
  const GidInfo gid = find_gid(device.name(), port, options.gid_index);
  gid_index_ = gid.index;
  queue_->reserve(room());
  try {
    create(port);
    endpoint_ = {number_,
                 random_psn(),
                 static_cast<uint16_t>(port.lid),
                 gid.gid,
                 gid.type,
                 port.link_layer,
                 port.active_mtu,
                 std::min(device.info().max_reads_in, kMaxReads)};
    to_init();
    queue_->add(this);
  } catch (...) {
    if (qp_) Verbs::get().p_ibv_destroy_qp(qp_);
    queue_->give_back(room());
    throw;
  }
}

void QueuePair::create(const PortInfo& port) {
  const Device& device = *queue_->device();
  ibv_qp_init_attr attr{};
  attr.send_cq = attr.recv_cq = queue_->cq_;
  attr.qp_type = IBV_QPT_RC;
  attr.cap.max_send_wr = options_.max_sends;
  attr.cap.max_recv_wr = std::max(options_.max_immediates, 1);
  attr.cap.max_send_sge = std::min(options_.max_sges, std::max(device.info().max_sge, 1));
  attr.cap.max_recv_sge = 1;
  qp_ = Verbs::get().p_ibv_create_qp(device.pd(), &attr);
  if (!qp_) {
    throw SystemError(errno, concat("ibv_create_qp: ", options_.max_sends, " sends and ",
                                    options_.max_immediates, " immediates on ", device.name(),
                                    ", which has at most ", device.info().max_qp, " queue pairs"));
  }
  number_ = qp_->qp_num;
  rename(concat("queue pair ", number_, " of ", device.name()));
  const int max_sges = static_cast<int>(attr.cap.max_send_sge);
  limits_ = {max_sges, std::min(max_sges, device.info().max_sge_read), message_bytes(port)};
}

// Polling takes the queue's lock, then this one's use; it must finish before exclusive access.
void QueuePair::interrupt() noexcept { queue_->remove(this); }

void QueuePair::release() noexcept {
  std::vector<Completion> out;
  {
    const std::lock_guard lock(mutex_);
    end_batches(kStatusClosed, &out);
    state_ = State::kReset;
    Verbs::get().p_ibv_destroy_qp(qp_);
  }
  queue_->push(std::move(out));
  // Its room goes to others, so leftovers in the queue must not occupy it.
  try {
    queue_->push_from_nic();
  } catch (const SystemError&) {  // the next poll will report it
  }
  queue_->give_back(room());
}

void QueuePair::modify(ibv_qp_attr* attr, int mask, const char* to) {
  const int error = Verbs::get().p_ibv_modify_qp(qp_, attr, mask);
  if (error == 0) return;
  std::string hint;
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    hint = ": no route from this port's GID to the peer's";
  }
  throw SystemError(error, concat("ibv_modify_qp: ", what(), " to ", to, hint));
}

void QueuePair::to_init() {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = static_cast<uint8_t>(options_.port);
  // The region's rights decide; the connection allows everything.
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  modify(&attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
  state_ = State::kInit;
}

void QueuePair::to_ready(const Endpoint& peer, const ConnectOptions& options) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = mtu_code(std::min(peer.mtu, endpoint_.mtu));
  attr.dest_qp_num = peer.qp_num;
  attr.rq_psn = peer.psn;
  attr.max_dest_rd_atomic = static_cast<uint8_t>(endpoint_.max_reads_in);
  attr.min_rnr_timer = 12;  // 0.64 ms
  attr.ah_attr.dlid = peer.lid;
  attr.ah_attr.sl = static_cast<uint8_t>(options.service_level);
  attr.ah_attr.port_num = static_cast<uint8_t>(options_.port);
  attr.ah_attr.is_global =
      endpoint_.link_layer != "InfiniBand" || peer.lid == 0 || !is_same_subnet(peer, endpoint_);
  std::memcpy(attr.ah_attr.grh.dgid.raw, peer.gid.data(), peer.gid.size());
  attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(gid_index_);
  attr.ah_attr.grh.hop_limit = 64;
  attr.ah_attr.grh.traffic_class = static_cast<uint8_t>(options.traffic_class);
  modify(&attr,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
         "RTR");
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = endpoint_.psn;
  attr.timeout = static_cast<uint8_t>(options.timeout);
  attr.retry_cnt = static_cast<uint8_t>(options.retries);
  attr.rnr_retry = static_cast<uint8_t>(options.rnr_retries);
  attr.max_rd_atomic = static_cast<uint8_t>(
      std::min({queue_->device()->info().max_reads_out, peer.max_reads_in, kMaxReads}));
  modify(&attr,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
             IBV_QP_MAX_QP_RD_ATOMIC,
         "RTS");
  state_ = State::kConnected;
}

void QueuePair::to_reset(std::vector<Completion>* out) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  modify(&attr, IBV_QP_STATE, "RESET");
  state_ = State::kReset;
  end_batches(kStatusClosed, out);
}

uint16_t QueuePair::next_generation() {
  static std::atomic<uint16_t> last{0};
  return ++last & 0x7fff;
}

void QueuePair::connect(const Endpoint& peer, const ConnectOptions& options) {
  const Use use(*this, "connect");
  check_compatible(endpoint_, peer);
  const auto check = [](const char* name, int value, int high) {
    MK_CHECK(value >= 0 && value <= high, "connect: ", name, " must be in 0 to ", high, ", got ",
             value);
  };
  check("timeout", options.timeout, 31);
  check("retries", options.retries, 7);
  check("rnr_retries", options.rnr_retries, 7);
  check("traffic_class", options.traffic_class, 255);
  check("service_level", options.service_level, 15);
  const std::lock_guard lock(mutex_);
  MK_CHECK(state_ != State::kReset, "connect: ", what(),
           " must be new or reset, but an attempt to connect it has failed: reset() it");
  MK_CHECK(state_ == State::kInit, "connect: ", what(), " must be new or reset, but was connected");
  MK_CHECK(peer.qp_num != last_peer_.qp_num || peer.psn != last_peer_.psn || last_peer_.mtu == 0,
           "connect: peer must be reset, too, got its endpoint of the earlier connection");
  last_peer_ = peer;
  state_ = State::kReset;  // so that it is reset again before a retry, should this attempt fail
  for (int i = 0; i < options_.max_immediates; ++i) {
    check_verb(post_receive(), "ibv_post_recv", what());
  }
  to_ready(peer, options);
}

void QueuePair::reset() {
  const Use use(*this, "reset");
  const std::lock_guard resetting(reset_mutex_);
  std::vector<Completion> out;
  std::unique_lock lock(mutex_);
  to_reset(&out);
  lock.unlock();
  queue_->push(std::move(out));
  queue_->push_from_nic();  // leftovers of the earlier connection occupy room
  lock.lock();
  const uint32_t before = endpoint_.psn;
  while (endpoint_.psn == before) endpoint_.psn = random_psn();
  to_init();
}

Endpoint QueuePair::endpoint() const {
  const std::lock_guard lock(mutex_);
  return endpoint_;
}

bool QueuePair::is_connected() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::kConnected;
}

}  // namespace mk::rdma
