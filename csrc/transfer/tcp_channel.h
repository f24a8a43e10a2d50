// TcpChannel: the peer is reached over one TCP connection, made anew after a failure.
//
// Layer: transfer. The other end is a Session of the peer's Server.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transfer/channel.h"
#include "transfer/endpoint.h"
#include "transfer/random.h"
#include "transfer/socket.h"

namespace mk::transfer {

class TcpChannel : public Channel {
 public:
  // Throws Unavailable if there is no such host.
  TcpChannel(std::shared_ptr<const Endpoint> own, const HostPort& where)
      : own_(std::move(own)), host_(where.host), addresses_(resolve(where)) {}

  Transport transport() const override { return Transport::kTcp; }
  void connect(Interrupt& interrupt, const Deadline& deadline) override;
  void disconnect() noexcept override { socket_.close(); }
  void run(const Request& request, Interrupt& interrupt, const Deadline& deadline,
           uint64_t& num_bytes_done) override;

 private:
  void check_instance(uint64_t instance);

  const std::shared_ptr<const Endpoint> own_;
  const std::string host_;
  const std::vector<SocketAddress> addresses_;
  Socket socket_;
  Link link_{random_value<uint64_t>(), 0};
  uint64_t peer_instance_ = 0;  // 0 before the first connection
  uint64_t request_id_ = 0;
};

}  // namespace mk::transfer
