// Session: the target's side of one connection. Serves batches until the peer leaves or breaks the
// protocol, or until it is interrupted.
//
// Layer: transfer. Runs in a thread of Server. Payload goes directly into and out of the regions,
// or through pinned memory if they are a GPU's.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/gpu/staging.h"
#include "transfer/net/endpoint.h"
#include "transfer/net/gate.h"
#include "transfer/net/handshake.h"
#include "transfer/net/socket.h"
#include "transfer/server/rdma_target.h"
#include "transfer/shm/liveness.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

class Session {
 public:
  Session(Endpoint& own, Gate& gate, Admission::Visit visit, Socket socket)
      : own_(own), gate_(gate), visit_(std::move(visit)), socket_(std::move(socket)), rdma_(own) {
    visit_.may_be_ended(interrupt_);
  }

  void run() noexcept;
  void interrupt() { interrupt_.signal("the engine was closed"); }
  bool finished() const { return finished_; }

 private:
  void serve_all();
  Links::Hold greet();
  Links::Hold let_in(Reception& reception, const Limit& limit);
  void serve_next();
  void serve(const BatchHeader& header, const Limit& limit);
  void receive_write(const BatchHeader& header, const Limit& limit);
  void send_read(const BatchHeader& header, const Limit& limit);
  void compare_checksums(const BatchHeader& header, const Limit& limit);
  void receive_notification(const BatchHeader& header, const Limit& limit);
  void send_regions(const BatchHeader& header, const Limit& limit);
  void send_gpus(const BatchHeader& header, const Limit& limit);
  void end_links(const BatchHeader& header, const Limit& limit);
  void answer_nic_query(const BatchHeader& header, const Limit& limit);
  void send_list(const BatchHeader& header, const Limit& limit);
  void handle_rpc(const BatchHeader& header, const Limit& limit);
  void take_in(Exchange& exchange, const Limit& limit);

  // The regions of the batch in table_; throws Refused.
  std::vector<RegionRef> check(const BatchHeader& header, Rights needed) const;
  void expect_readable(const std::vector<RegionRef>& regions) const;  // of table_; throws Refused
  void check_offered() const;  // that data may go over this connection; throws Refused
  std::vector<iovec>& parts_of_table();
  void acknowledge(const BatchHeader& header, const Limit& limit);
  void respond(const BatchHeader& header, const void* data, uint64_t num_bytes, const Limit& limit);
  void refuse(const BatchHeader& header, const ErrorReason& why, const Limit& limit);

  Endpoint& own_;
  Gate& gate_;
  Interrupt interrupt_;
  Admission::Visit visit_;  // which may signal the interrupt
  Socket socket_;
  std::string peer_name_;
  LinkId link_{};
  uint64_t refused_request_ = 0;  // the rest of it is refused, too
  std::vector<Range> table_;
  std::string control_;  // what follows the table, see num_control_bytes
  std::vector<iovec> parts_;
  std::vector<uint64_t> checksums_;
  // Within a machine: what the initiator copies by itself.
  std::shared_ptr<ControlPage> page_;
  std::optional<Liveness> liveness_;            // on the control page
  std::map<uint64_t, uint32_t> sent_memories_;  // SharedMemory's id -> place in sending order
  uint32_t num_memories_sent_ = 0;
  RdmaTarget rdma_;
  Staging staging_;  // of GPU memory

  std::atomic<bool> finished_{false};
};

}  // namespace mk::transfer
