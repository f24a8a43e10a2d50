// WireChannel: a connection to the peer that speaks docs/wire.md, made anew after a failure: the
// transport tcp, and what shared memory is agreed upon over.
//
// Layer: transfer. The other end is a Session of the peer's Server. Works go out as frames, each of
// which the peer acknowledges; writes keep two under way, so that one is received while the next is
// sent. Reads keep one: sending the next table while the peer sends payload could, with small
// socket buffers, leave both sides waiting for the other to read.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transfer/channel.h"
#include "transfer/endpoint.h"
#include "transfer/random.h"
#include "transfer/socket.h"
#include "transfer/wire.h"

namespace mk::transfer {

// Which engine a peer is: all connections to it must lead to the same one.
class PeerIdentity {
 public:
  explicit PeerIdentity(uint64_t expected) : expected_(expected) {}  // 0: whoever answers first

  // Throws Failure if it is another engine.
  void check(uint64_t instance);

 private:
  const uint64_t expected_;
  std::atomic<uint64_t> instance_{0};  // 0 before the first connection
};

class WireChannel : public Channel {
 public:
  // `host` is what the peer's certificate must be for.
  WireChannel(std::shared_ptr<const Endpoint> own, std::string host,
              std::vector<SocketAddress> addresses, std::shared_ptr<PeerIdentity> identity)
      : own_(std::move(own)),
        host_(std::move(host)),
        addresses_(std::move(addresses)),
        identity_(std::move(identity)) {}

  Transport transport() const override { return Transport::kTcp; }
  std::string path(size_t number) const override { return concat("tcp:", number); }
  size_t window() const override { return 2; }
  uint64_t max_piece_bytes() const override { return kMaxWriteBytes; }
  void connect(const Limit& limit) override;
  void disconnect() noexcept override;
  bool connected() const override { return socket_.at_rest(); }
  void post(const Work& work, const Limit& limit, Interrupt& interrupt) override;
  Outcome finish(const Limit& limit) override;
  std::unique_ptr<Channel> another() const override {
    return std::make_unique<WireChannel>(own_, host_, addresses_, identity_);
  }
  Way way_to(const Range&) const override;
  std::vector<RegionTable::Listed> list_regions(const Limit& limit) override;

 protected:
  // A kMove, of which current_ tells what came, or will; a kCheck.
  virtual void move(const Work& work, const Limit& limit);
  virtual void check(const Work& work, const Limit& limit);

  // Waits until the peer has acknowledged all.
  void drain(const Limit& limit);

  const std::shared_ptr<const Endpoint> own_;
  const std::string host_;
  const std::vector<SocketAddress> addresses_;
  const std::shared_ptr<PeerIdentity> identity_;
  Socket socket_;
  Outcome current_;  // of the work whose frames are acknowledged now

 private:
  // What the peer has yet to acknowledge.
  struct Frame {
    Op op;
    uint64_t request_id;
    uint64_t num_bytes;
    bool last_of_work;
  };

  void notify(const Work& work, const Limit& limit);
  void send(const Work& work, Op op, uint64_t first_range, const Range* ranges, size_t num_ranges,
            const std::vector<iovec>& payload, uint64_t num_bytes, const Limit& limit);
  void receive_ack(const Limit& limit);
  std::string receive_refusal(const Ack& ack, const Limit& limit);

  Link link_{random_value<uint64_t>(), 0};
  std::deque<Frame> frames_;
  std::deque<Outcome> outcomes_;  // of works that are over
  Batch batch_;
  std::vector<iovec> parts_;
};

}  // namespace mk::transfer
