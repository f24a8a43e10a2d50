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
  std::string path(size_t number) const override { return concat("local:", number); }
  size_t window() const override { return 1; }
  // A copy inside itself cannot be cut.
  uint64_t max_piece_bytes() const override { return UINT64_MAX; }
  void connect(const Limit& limit) override;
  void disconnect() noexcept override {}
  bool connected() const override { return true; }
  void post(const Work& work, const Limit& limit, Interrupt& interrupt) override {
    outcome_ = *run(work, limit, interrupt);
  }
  Outcome finish(const Limit&) override { return std::move(outcome_); }
  std::unique_ptr<Channel> another() const override {
    return std::make_unique<LocalChannel>(own_name_, *find_peer());
  }
  Way way_to(const Range&) const override {
    return {"copy", "this process", "it is a copy within this process"};
  }
  std::vector<RegionTable::Listed> list_regions(const Limit&) override;
  bool runs_here() const override { return true; }
  std::optional<Outcome> run(const Work& work, const Limit& limit, Interrupt& interrupt) override;

 private:
  std::shared_ptr<Endpoint> find_peer() const;  // throws Failure once it is closed
  void carry_out(const Work& work, const Limit& limit, Interrupt& interrupt, Outcome& out) const;

  const std::string own_name_;
  const std::string peer_address_;
  const uint64_t peer_instance_;
  Outcome outcome_;
};

}  // namespace mk::transfer
