// LocalChannel: the peer is an engine of this process, and a transfer is a copy.
//
// Layer: transfer. Descriptors are copied in order; one whose source and target overlap arrives as
// if it had been copied through a buffer (memmove).
#pragma once

#include <memory>
#include <string>

#include "transfer/channel.h"
#include "transfer/endpoint.h"

namespace mk::transfer {

class LocalChannel : public Channel {
 public:
  LocalChannel(std::string own_name, const Endpoint& peer)
      : own_name_(std::move(own_name)),
        peer_address_(peer.address),
        peer_instance_(peer.instance) {}

  Transport transport() const override { return Transport::kLocal; }
  void connect(Interrupt& interrupt, const Deadline& deadline) override;
  void disconnect() noexcept override {}
  void run(const Request& request, Interrupt& interrupt, const Deadline& deadline,
           uint64_t& num_bytes_done) override;

 private:
  std::shared_ptr<Endpoint> find_peer() const;  // throws Failure once it is closed

  const std::string own_name_;
  const std::string peer_address_;
  const uint64_t peer_instance_;
};

}  // namespace mk::transfer
