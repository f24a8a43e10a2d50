#include "rdma/completion_queue.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "rdma/error.h"
#include "rdma/queue_pair.h"
#include "rdma/wait.h"

namespace mk::rdma {
namespace {

constexpr int kPollBatch = 32;

int checked_depth(const Device& device, int depth) {
  MK_CHECK(depth >= 1 && depth <= device.info().max_cqe, "completion_queue: depth must be in 1 to ",
           device.info().max_cqe, " on ", device.name(), ", got ", depth);
  return depth;
}

}  // namespace

std::string status_text(int status) {
  if (status == kStatusClosed) return "closed";
  return Verbs::get().p_ibv_wc_status_str(static_cast<ibv_wc_status>(status));
}

std::shared_ptr<CompletionQueue> CompletionQueue::make(std::shared_ptr<Device> device, int depth) {
  const Use use(*device, "completion_queue");  // until it has joined the device, too
  return make_resource<CompletionQueue>(device, depth);
}

CompletionQueue::CompletionQueue(std::shared_ptr<Device> device, int depth)
    : Resource(concat("completion queue of ", device->name()), {device}),
      device_(std::move(device)),
      depth_(checked_depth(*device_, depth)),
      wake_(MK_SYSCALL(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  const Verbs& verbs = Verbs::get();
  channel_ = check_handle(verbs.p_ibv_create_comp_channel(device_->context()),
                          "ibv_create_comp_channel", device_->name());
  const int flags = fcntl(channel_->fd, F_GETFL);
  fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK);
  cq_ = verbs.p_ibv_create_cq(device_->context(), depth, nullptr, channel_, 0);
  if (cq_) return;
  const int error = errno;
  verbs.p_ibv_destroy_comp_channel(channel_);
  throw SystemError(error, concat("ibv_create_cq: ", depth, " entries on ", device_->name()));
}

void CompletionQueue::release() noexcept {
  const Verbs& verbs = Verbs::get();
  if (unacknowledged_ > 0) verbs.p_ibv_ack_cq_events(cq_, unacknowledged_);
  verbs.p_ibv_destroy_cq(cq_);
  verbs.p_ibv_destroy_comp_channel(channel_);
}

void CompletionQueue::interrupt() noexcept { eventfd_write(wake_.get(), 1); }

void CompletionQueue::reserve(int room) {
  const std::lock_guard lock(poll_mutex_);
  MK_CHECK(room <= depth_ - room_taken_, "queue_pair: queue must have room for ", room,
           " more work requests (max_sends + max_immediates), got a depth of ", depth_, ", ",
           room_taken_, " of it taken");
  room_taken_ += room;
}

void CompletionQueue::give_back(int room) noexcept {
  const std::lock_guard lock(poll_mutex_);
  room_taken_ -= room;
}

void CompletionQueue::add(QueuePair* queue_pair) {
  const std::lock_guard lock(poll_mutex_);
  queue_pairs_[queue_pair->number()] = queue_pair;
}

void CompletionQueue::remove(QueuePair* queue_pair) noexcept {
  const std::lock_guard lock(poll_mutex_);
  queue_pairs_.erase(queue_pair->number());
}

void CompletionQueue::push(std::vector<Completion> completions) {
  if (completions.empty()) return;
  const std::lock_guard lock(pushed_mutex_);
  pushed_.insert(pushed_.end(), completions.begin(), completions.end());
  eventfd_write(wake_.get(), 1);
}

void CompletionQueue::wake() {
  const Use use(*this, "wake");
  const std::lock_guard lock(pushed_mutex_);
  is_woken_ = true;
  eventfd_write(wake_.get(), 1);
}

bool CompletionQueue::has_pushed() {
  const std::lock_guard lock(pushed_mutex_);
  return is_woken_ || !pushed_.empty();
}

// Only the thread that waits does this, so that it cannot miss a wake-up.
void CompletionQueue::end_wake() noexcept {
  const std::lock_guard lock(pushed_mutex_);
  if (!is_woken_) return;
  is_woken_ = false;
  eventfd_t count;
  if (pushed_.empty()) eventfd_read(wake_.get(), &count);
  if (is_leaving()) interrupt();  // as in poll()
}

std::vector<Completion> CompletionQueue::poll(int max_work) {
  std::vector<Completion> out;
  poll(max_work, out);
  return out;
}

void CompletionQueue::poll(int max_work, std::vector<Completion>& out) {
  const Use use(*this, "poll");
  MK_CHECK(max_work >= 1, "poll: max_work must be positive, got ", max_work);
  out.clear();
  {
    const std::lock_guard lock(pushed_mutex_);
    out.swap(pushed_);
    eventfd_t count;
    if (!out.empty() && !is_woken_) eventfd_read(wake_.get(), &count);
    if (is_leaving()) interrupt();  // this call may have consumed the wakeup
  }
  poll_nic(max_work, &out);
}

void CompletionQueue::poll_nic(int max_work, std::vector<Completion>* out) {
  const std::lock_guard lock(poll_mutex_);
  ibv_wc wcs[kPollBatch];
  for (int asked = 0, got = 0; max_work > 0 && got == asked; max_work -= got) {
    asked = std::min(max_work, kPollBatch);
    got = ibv_poll_cq(cq_, asked, wcs);
    if (got < 0) {
      push(std::move(*out));  // for the next poll
      throw SystemError(EIO, concat("ibv_poll_cq: ", device_->name()));
    }
    for (int i = 0; i < got; ++i) {
      const auto found = queue_pairs_.find(wcs[i].qp_num);
      if (found != queue_pairs_.end()) found->second->complete(wcs[i], out);
    }
  }
}

// The right to wait for the NIC, held by one thread at a time.
class CompletionQueue::Turn {
 public:
  Turn(CompletionQueue* queue, double timeout_s) : queue_(queue) {
    std::unique_lock lock(queue_->turn_mutex_);
    const std::chrono::duration<double> timeout(timeout_s);
    has_come_ = queue_->turn_over_.wait_for(lock, timeout, [&] { return !queue_->is_waiting_; });
    if (has_come_) queue_->is_waiting_ = true;
  }
  Turn(const Turn&) = delete;
  ~Turn() {
    if (!has_come_) return;
    queue_->end_wake();
    const std::lock_guard lock(queue_->turn_mutex_);
    queue_->is_waiting_ = false;
    queue_->turn_over_.notify_one();
  }

  bool has_come() const { return has_come_; }

 private:
  CompletionQueue* const queue_;
  bool has_come_ = false;
};

bool CompletionQueue::wait(double timeout_s, double spin_s) {
  const Use use(*this, "wait");
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto waited_s = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  timeout_s = std::clamp(timeout_s, 0.0, 1e9);
  const Turn turn(this, timeout_s);
  if (!turn.has_come()) return has_pushed();
  while (waited_s() < std::min(spin_s, timeout_s) && !is_leaving()) {
    if (has_pushed() || push_from_nic()) return true;
  }
  while (!has_pushed()) {
    ask_for_event();
    if (push_from_nic()) return true;
    if (!sleep(timeout_s - waited_s())) return has_pushed();
  }
  return true;
}

bool CompletionQueue::arm() {
  const Use use(*this, "wait");
  take_nic_event();
  ask_for_event();
  return push_from_nic() || has_pushed();
}

// Only completions after the request raise an event: check again for earlier ones.
void CompletionQueue::ask_for_event() {
  check_verb(ibv_req_notify_cq(cq_, 0), "ibv_req_notify_cq", device_->name());
}

bool CompletionQueue::push_from_nic() {
  std::vector<Completion> found;
  poll_nic(depth_, &found);
  if (found.empty()) return false;
  push(std::move(found));
  return true;
}

// Sleeps until the NIC or a queue pair has something: false at the timeout, or once closed.
bool CompletionQueue::sleep(double timeout_s) {
  const bool nic = wait_readable(channel_->fd, wake_.get(), timeout_s);
  if (nic) take_nic_event();
  return nic || (!is_leaving() && has_pushed());
}

void CompletionQueue::take_nic_event() {
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  if (Verbs::get().p_ibv_get_cq_event(channel_, &cq, &context) != 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    // The channel of a device that is gone stays readable for ever.
    throw SystemError(errno, concat("ibv_get_cq_event: ", device_->name()));
  }
  // Acknowledging takes a lock in the library: do many at a time.
  if (++unacknowledged_ < 1024) return;
  Verbs::get().p_ibv_ack_cq_events(cq_, unacknowledged_);
  unacknowledged_ = 0;
}

}  // namespace mk::rdma
