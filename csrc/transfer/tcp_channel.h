// TcpChannel: the peer is reached over one TCP connection, made anew after a failure.
//
// Layer: transfer. The other end is a Session of the peer's Server.
#pragma once

#include <memory>
#include <vector>

#include "transfer/channel.h"
#include "transfer/endpoint.h"
#include "transfer/socket.h"

namespace mk::transfer {

class TcpChannel : public Channel {
 public:
  // An engine of another instance than the expected one is refused; 0: whoever answers first.
  TcpChannel(std::shared_ptr<const Endpoint> own, std::vector<SocketAddress> addresses,
             uint64_t expected_instance)
      : own_(std::move(own)),
        addresses_(std::move(addresses)),
        expected_instance_(expected_instance) {}

  Transport transport() const override { return Transport::kTcp; }
  void connect(Interrupt& interrupt, const Deadline& deadline) override;
  void disconnect() noexcept override { socket_.close(); }
  void run(const Request& request, Interrupt& interrupt, const Deadline& deadline,
           uint64_t& num_bytes_done) override;

 private:
  void greet(Socket& socket, const Limit& limit);

  const std::shared_ptr<const Endpoint> own_;
  const std::vector<SocketAddress> addresses_;
  const uint64_t expected_instance_;
  Socket socket_;
  uint64_t peer_instance_ = 0;  // 0 before the first connection
  uint64_t request_id_ = 0;
};

}  // namespace mk::transfer
