// RdmaChannel: NICs move the data, all of either side at once; an accompanying connection
// (docs/internals/wire.md) sets up queue pairs, exchanges keys, and carries notifications and what
// NICs cannot.
//
// Layer: transfer. A piece is cut into slices, each of which goes to the rail that will finish it
// first, so that a slow one gets fewer and an idle one more. If a rail fails, its slices go to
// others, once the peer has ended its queue pair: what was in flight cannot land later. The rail is
// then retried from time to time, with another NIC of the peer's.
#pragma once

#include <poll.h>

#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "transfer/rdma/rails.h"
#include "transfer/rdma/slicer.h"
#include "transfer/tcp/tcp_channel.h"

namespace mk::transfer {

class RdmaChannel : public TcpChannel {
 public:
  // `only`: what NICs cannot move is an error; otherwise it uses the connection.
  RdmaChannel(std::shared_ptr<const Endpoint> own, HostPort to,
              std::vector<SocketAddress> addresses, std::shared_ptr<PeerIdentity> identity,
              bool only)
      : TcpChannel(std::move(own), std::move(to), std::move(addresses), std::move(identity)),
        only_(only) {}
  ~RdmaChannel() override { disconnect(); }

  // Whether the peer has NICs that can connect to ours. Asks it; does not stay connected.
  bool finds_nics(const Deadline& deadline, std::string& why_not);

  Transport transport() const override { return Transport::kRdma; }
  std::string path(size_t) const override { return "connection"; }
  void count_in(PeerCounters& counters) override { counters_ = &counters; }
  std::unique_ptr<Channel> another() const override {
    return std::make_unique<RdmaChannel>(own_, to_, addresses_, identity_, only_);
  }
  Path path_to(const Range& range, int device) const override;
  size_t window() const override;
  void connect(const Limit& limit) override;
  void disconnect() noexcept override;
  void post(const Work& work, const Limit& limit) override;
  Outcome finish(const Limit& limit) override;
  std::string trouble() const override;

 private:
  struct Doing {
    Work work;
    uint64_t num_slices = 0;  // that are not over
    uint64_t num_bytes = 0;
    bool by_nics = false;    // false: by the connection
    bool has_lost = false;   // no rail moves some slices
    std::string why_lost{};  // empty: the peer has given up their memory meanwhile
  };

  // Of the peer's regions that are not known and that these are in.
  void learn_keys(const Request& request, const Piece& piece, const Limit& limit);
  void learn_keys(const std::vector<uint64_t>& addresses, const Limit& limit);
  void await_ports(const Limit& limit);
  void bring_up(const Limit& limit);
  void lose(Rail& rail, const RailDown& down, const Limit& limit);
  void tell_trouble();  // after each change of the rails

  // Works.
  // The slices of a piece that rails are to move, creating rails for them; false if NICs cannot
  // move all of it.
  bool slices_of(const Request& request, const Piece& piece, Slices& slices);
  Outcome after_slices(const Doing& doing, const Limit& limit);
  Outcome ask_why_not(const Doing& doing, const Limit& limit);
  Outcome over_connection(const Work& work, const Limit& limit);
  void flush(const Limit& limit);
  void pump(const Limit& limit);
  Rail* rail_for(const Slice& slice, const RemoteRegion& remote, const Limit& limit);
  void give_up(Slices& slices, const std::string& why);  // the first of them
  void collect(const Limit& limit);
  void settle(Slices& done);
  void sleep(const Limit& limit);
  Doing& doing_of(const Slice& slice) { return doing_[slice.work - first_doing_]; }

  const bool only_;
  PeerCounters not_read_;  // until count_in()
  PeerCounters* counters_ = &not_read_;

  RemoteKeys keys_;
  NicQueries queries_{socket_};
  Rails rails_{*own_->nics};
  Slices ready_;  // no rail has them
  Slices spare_;
  std::vector<pollfd> fds_;   // of sleep()
  std::deque<Doing> doing_;   // in the order in which they were posted
  uint64_t first_doing_ = 0;  // number of the first of them

  mutable std::mutex trouble_mutex_;
  std::string trouble_;
};

}  // namespace mk::transfer
