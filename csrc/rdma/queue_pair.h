// QueuePair: a reliable connection (RC) between two NICs, over which one reads and writes the
// other's memory.
//
//   auto pair = QueuePair::make(queue, {});
//   pair->connect(endpoint_of_the_peer, {});
//   pair->submit(transfer);    // never blocks; the queue reports its completion
//
// Layer: rdma. Thread-safe.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "rdma/completion_queue.h"
#include "rdma/endpoint.h"
#include "rdma/work.h"

namespace mk::rdma {

struct QueuePairOptions {
  int port = 1;
  int gid_index = -1;      // -1: chosen (choose_gid)
  int max_sends = 256;     // work requests in flight; the rest of a transfer is queued here
  int max_sges = 16;       // ranges of local memory per work request, if the device supports it
  int max_immediates = 0;  // how many of the peer's immediates may wait to be polled
};

struct ConnectOptions {
  int timeout = 14;     // of an acknowledgement: 4.096 us * 2^timeout
  int retries = 6;      // before a transfer fails with RETRY_EXC_ERR; soft-RoCE takes 7 as infinite
  int rnr_retries = 7;  // while the peer has no room for an immediate; 7: infinite
  int traffic_class = 0;
  int service_level = 0;
};

class QueuePair final : public Resource {
 public:
  static std::shared_ptr<QueuePair> make(std::shared_ptr<CompletionQueue> queue,
                                         const QueuePairOptions& options);

  QueuePair(std::shared_ptr<CompletionQueue> queue, const QueuePairOptions& options);  // for make
  ~QueuePair() override { close(); }

  uint32_t number() const { return number_; }
  Endpoint endpoint() const;  // what the peer connects to; changes with a reset
  void connect(const Endpoint& peer, const ConnectOptions& options);
  // Prepares it to be connected again; what is in flight ends as closed. Both sides must reset and
  // exchange their new endpoints: a peer of the earlier connection would take the packets of the
  // new one for duplicates, and acknowledge them without executing them.
  void reset();

  // Writes to the peer, or reads from it. The queue reports its completion, once; after a failure
  // all later transfers fail, until it is connected again.
  void submit(const Transfer& transfer);
  bool is_connected() const;  // and has not failed

 private:
  friend class CompletionQueue;
  enum class State { kReset, kInit, kConnected, kFailed };

  // A transfer in progress.
  struct Batch {
    WorkList work;
    RegionRef region;  // keeps its keys valid
    uint64_t token = 0;
    std::optional<uint32_t> immediate;
    size_t num_posted = 0;   // work requests
    uint64_t first_seq = 0;  // of its first work request
    int status = 0;
    uint32_t vendor_error = 0;
    uint64_t num_bytes_done = 0;

    bool is_posted() const { return num_posted == work.requests.size(); }
    uint64_t end_seq() const { return first_seq + num_posted; }
    Completion completion(uint32_t qp_num) const;
  };

  using Batches = std::list<Batch>;

  // Handles a work completion of this queue pair; appends what is complete.
  void complete(const ibv_wc& wc, std::vector<Completion>* out);

  int room() const { return options_.max_sends + options_.max_immediates; }

  // All require mutex_.
  void create(const PortInfo& port);
  void modify(ibv_qp_attr* attr, int mask, const char* to);
  void to_init();
  void to_ready(const Endpoint& peer, const ConnectOptions& options);
  void to_reset(std::vector<Completion>* out);
  static uint16_t next_generation();
  void post_pending(std::vector<Completion>* out);
  int post_chain(Batch* batch, size_t count);
  int post_receive();  // returns the errno
  void take_immediate(const ibv_wc& wc, std::vector<Completion>* out);
  void retire(uint64_t end_seq, std::vector<Completion>* out);
  void fail(Batch* batch, int status, uint32_t vendor_error);
  void give_up(std::vector<Completion>* out);
  Batches take_spare();  // one
  void end(Batches::iterator batch, std::vector<Completion>* out);
  void end_batches(int status, std::vector<Completion>* out);
  void fail_pending(std::vector<Completion>* out);
  uint64_t wr_id(uint64_t seq) const;

  void release() noexcept override;
  void interrupt() noexcept override;

  const std::shared_ptr<CompletionQueue> queue_;
  const QueuePairOptions options_;
  ibv_qp* qp_ = nullptr;
  uint32_t number_ = 0;
  int gid_index_ = 0;
  Endpoint endpoint_;  // its psn under mutex_
  Endpoint last_peer_;
  WorkLimits limits_;

  std::mutex reset_mutex_;  // held during a reset
  mutable std::mutex mutex_;
  State state_ = State::kReset;
  Batches batches_;                             // in order of submission
  Batches::iterator waiting_ = batches_.end();  // the first of them not posted completely
  Batches spare_;                               // their buffers are used again
  uint64_t head_ = 0;                           // sequence number of the next work request
  uint64_t tail_ = 0;                           // of the oldest in flight
  // Numbers connections, including those of other queue pairs that had this QP number, so that
  // their completions can be ignored.
  uint16_t generation_ = next_generation();
};

}  // namespace mk::rdma
