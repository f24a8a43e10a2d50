// CompletionQueue: reports completed transfers of its queue pairs, and immediates that arrived.
//
//   auto queue = CompletionQueue::make(device, 1024);
//   queue->wait(0.5);                                  // sleeps until there is something, or 0.5 s
//   for (const Completion& c : queue->poll(64)) ...
//
// Layer: rdma. Thread-safe; a thread that polls also posts what its queue pairs had no room for.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/fd.h"
#include "rdma/device.h"
#include "rdma/verbs.h"

namespace mk::rdma {

class QueuePair;

struct Completion {
  enum class Kind { kTransfer, kImmediate };

  Kind kind = Kind::kTransfer;
  uint64_t token = 0;  // of a transfer: the one that it was submitted with
  uint32_t qp_num = 0;
  int status = 0;  // IBV_WC_SUCCESS, or why it failed (ibv_wc_status)
  uint32_t vendor_error = 0;
  uint32_t immediate = 0;  // of kImmediate
  uint64_t num_bytes = 0;  // of a transfer: certainly delivered; of kImmediate: written with it
};

// A wc status in words; "closed" for work that its queue pair had not done when it was closed.
constexpr int kStatusClosed = -1;
std::string status_text(int status);

class CompletionQueue final : public Resource {
 public:
  // `depth`: the total number of work requests that its queue pairs may have in flight.
  static std::shared_ptr<CompletionQueue> make(std::shared_ptr<Device> device, int depth);

  CompletionQueue(std::shared_ptr<Device> device, int depth);  // for make
  ~CompletionQueue() override { close(); }

  const std::shared_ptr<Device>& device() const { return device_; }
  int depth() const { return depth_; }

  // What there is, from at most `max_work` of the NIC's work completions; never blocks.
  std::vector<Completion> poll(int max_work);
  void poll(int max_work, std::vector<Completion>& out);  // the same, in a buffer that is kept
  // Sleeps until there is something to poll: false at the timeout, or once closed. Busy-waits for
  // the first `spin_s`: waking up takes longer than a short transfer.
  bool wait(double timeout_s, double spin_s = 0);
  // Ends a wait() of another thread, or else the next one, as if there were something to poll.
  void wake();

  // For a single thread that also waits for other things: after arm() has returned false, one of
  // fds() becomes readable as soon as there is something to poll, or the queue is being closed.
  bool arm();
  std::array<int, 2> fds() const { return {channel_->fd, wake_.get()}; }

 private:
  friend class QueuePair;
  class Turn;

  // For queue pairs; `room`: how many entries theirs may occupy at once.
  void reserve(int room);
  void give_back(int room) noexcept;
  void add(QueuePair* queue_pair);
  void remove(QueuePair* queue_pair) noexcept;     // returns when it is not being polled
  void push(std::vector<Completion> completions);  // those without a work completion
  bool push_from_nic();  // drains the NIC's queue for the next poll; whether it held any

  void poll_nic(int max_work, std::vector<Completion>* out);
  bool has_pushed();
  void end_wake() noexcept;
  bool sleep(double timeout_s);
  void ask_for_event();
  void take_nic_event();
  void release() noexcept override;
  void interrupt() noexcept override;

  const std::shared_ptr<Device> device_;
  const int depth_;
  const Fd wake_;  // an eventfd: readable after a push, or once it is being closed
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;

  std::mutex poll_mutex_;  // held while queue pairs handle work completions
  std::map<uint32_t, QueuePair*> queue_pairs_;
  int room_taken_ = 0;

  std::mutex pushed_mutex_;
  std::vector<Completion> pushed_;
  bool is_woken_ = false;

  std::mutex turn_mutex_;
  std::condition_variable turn_over_;
  bool is_waiting_ = false;      // one thread waits, and others wait for it
  unsigned unacknowledged_ = 0;  // of that thread
};

}  // namespace mk::rdma
