// TcpChannel: a connection to the peer that speaks docs/internals/wire.md, re-established after a
// failure: the transport tcp, and the connection that accompanies shared memory and NICs.
//
// Layer: transfer. The other end is a Session of the peer's Server. Works are sent as frames, each
// of which the peer acknowledges. Writes keep two in flight, so that one is received while the next
// is sent. Reads keep one: sending the next table while the peer sends payload could, with small
// socket buffers, leave both sides waiting for the other to read.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transfer/base/random.h"
#include "transfer/channel/caller_driven.h"
#include "transfer/channel/channel.h"
#include "transfer/channel/rpc_channel.h"
#include "transfer/gpu/staging.h"
#include "transfer/net/endpoint.h"
#include "transfer/net/peer_identity.h"
#include "transfer/net/socket.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

class TcpChannel : public RpcChannel, private CallerDriven {
 public:
  // `to` is what was opened: the peer must be of that address, and its certificate for that host.
  TcpChannel(std::shared_ptr<const Endpoint> own, HostPort to, std::vector<SocketAddress> addresses,
             std::shared_ptr<PeerIdentity> identity)
      : own_(std::move(own)),
        to_(std::move(to)),
        addresses_(std::move(addresses)),
        identity_(std::move(identity)) {}

  Transport transport() const override { return Transport::kTcp; }
  std::string path(size_t number) const override { return concat("tcp:", number); }
  size_t window() const override { return 2; }
  uint64_t max_piece_bytes() const override { return kMaxWriteBytes; }
  void connect(const Limit& limit) override;
  void disconnect() noexcept override;
  void close() noexcept override;
  bool connected() const override { return socket_.at_rest(); }
  void post(const Work& work, const Limit& limit) override;
  Outcome finish(const Limit& limit) override;
  bool has_outcome() const override { return !outcomes_.empty(); }
  uint64_t num_bytes_so_far() const override { return current_.num_bytes; }
  std::unique_ptr<Channel> another() const override {
    return std::make_unique<TcpChannel>(own_, to_, addresses_, identity_);
  }
  std::unique_ptr<RpcChannel> for_rpc() const override {
    return std::make_unique<TcpChannel>(own_, to_, addresses_, identity_);
  }
  CallerDriven* caller_driven() override;
  bool is_pooled() const override { return true; }
  Path path_to(const Range&, int device) const override;
  std::vector<RegionTable::Listed> list_regions(const Limit& limit) override;
  uint64_t call(const std::string& request, std::vector<iovec> payload,
                const Limit& limit) override;
  void receive_response(iovec* parts, size_t num_parts, const Limit& limit) override {
    socket_.receive(parts, num_parts, limit);
  }

 protected:
  // Carry out a kMove, whose progress is in current_, and a kCheck.
  virtual void move(const Work& work, const Limit& limit);
  virtual void check(const Work& work, const Limit& limit);

  // Waits until the peer has acknowledged all.
  void drain(const Limit& limit);

  // Before anything new moves: what other connections to the peer were writing when they were lost
  // is over, or will not land.
  void fence_lost(const Limit& limit);

  // Has the peer compare what it holds now of a piece that has moved, if the request asks for it:
  // what differs is current_'s refusal.
  void compare(const Work& work, const Limit& limit);
  bool must_fence() const { return identity_->has_lost(); }

  // Sends a query that is no more than its op. Nothing may be in flight.
  template <class Entry>
  std::vector<Entry> query(Op op, size_t most, const Limit& limit) {
    BatchHeader header{op, 0, kQueryId, 0, 0};
    sign(socket_.frame_macs(), header, {});
    socket_.send(&header, sizeof(header), limit);
    const Ack ack = receive_response_ack(sizeof(Entry), most * sizeof(Entry), limit);
    std::vector<Entry> entries(ack.num_bytes / sizeof(Entry));
    socket_.receive(entries.data(), ack.num_bytes, limit);
    verify(socket_.frame_macs(), ack, {{entries.data(), ack.num_bytes}});
    return entries;
  }

  const std::shared_ptr<const Endpoint> own_;
  const HostPort to_;
  const std::vector<SocketAddress> addresses_;
  const std::shared_ptr<PeerIdentity> identity_;
  Socket socket_;
  bool is_writing_ = false;  // the peer has not confirmed all that it may write to its memory
  Outcome current_;          // of the work whose frames are acknowledged now

 private:
  bool may_drive(const Request& request) const override;
  bool can_drive(const Request& request) const override;
  int ready_fd() const override { return socket_.fd(); }
  bool is_ready() const override;
  bool wait_for_all() override;
  void wait_for_any() override { socket_.wake_from(1); }
  std::chrono::microseconds spin() const override { return own_->spin; }

  bool try_connect(const Limit& limit, bool is_last);

  // What the peer has yet to acknowledge.
  struct Frame {
    Op op;
    uint64_t request_id;
    uint64_t num_bytes;
    bool last_of_work;
    uint64_t num_lent = 0;  // to the kernel, when it was sent
  };
  static constexpr uint64_t kQueryId = 1;  // queries are numbered apart from requests

  uint64_t num_bytes_due() const;  // unless something is refused
  bool is_reading() const { return !frames_.empty() && frames_.back().op == Op::kRead; }

  void move_and_notify(const Work& work, const Limit& limit);
  void notify(const Work& work, const Limit& limit);
  void send(const Work& work, Op op, uint64_t first_range, const Range* ranges, size_t num_ranges,
            const std::vector<iovec>& payload, uint64_t num_bytes, const Limit& limit);
  void receive_ack(const Limit& limit);
  // Unless it is a refusal, the caller has to verify it.
  Ack receive_response_ack(uint64_t entry_bytes, uint64_t max_bytes, const Limit& limit);
  ErrorReason receive_refusal(const Ack& ack, const Limit& limit);

  Link link_{random_value<uint64_t>(), 0};
  std::deque<Frame> frames_;
  uint64_t num_sent_ = 0;         // frames of works, ever
  std::deque<Outcome> outcomes_;  // of works that are over
  Batch batch_;                   // also of a read in flight
  GpuRanges reading_gpus_;        // of that read's local memory
  NumEqual num_equal_ = 0;
  std::vector<uint64_t> checksums_;
  std::vector<iovec> parts_;
  Staging staging_;  // of GPU memory
};

}  // namespace mk::transfer
