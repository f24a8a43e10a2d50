// LocalChannel: the peer is an engine of this process, and a transfer is a copy.
//
// Layer: transfer. Descriptors are copied in order; one whose source and target overlap arrives as
// if copied through a buffer (memmove). If either end is GPU memory, GPUs copy, in any order,
// driven by the lane's thread.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "transfer/channel/caller_driven.h"
#include "transfer/channel/channel.h"
#include "transfer/gpu/gpu_queue.h"
#include "transfer/memory/gpu_ranges.h"
#include "transfer/net/endpoint.h"

namespace mk::transfer {

class LocalChannel : public Channel, private RunsInCaller {
 public:
  LocalChannel(std::string own_name, const std::shared_ptr<Endpoint>& peer)
      : own_name_(std::move(own_name)), peer_(peer) {}

  Transport transport() const override { return Transport::kLocal; }
  std::string path(size_t number) const override { return concat("local:", number); }
  size_t window() const override { return 1; }
  // A copy within itself cannot be cut.
  uint64_t max_piece_bytes() const override { return UINT64_MAX; }
  void connect(const Limit& limit) override;
  void disconnect() noexcept override {}
  void close() noexcept override { queue_.close(); }
  bool connected() const override { return true; }
  void post(const Work& work, const Limit& limit) override;
  Outcome finish(const Limit&) override { return std::move(outcome_); }
  std::unique_ptr<Channel> another() const override {
    return std::make_unique<LocalChannel>(own_name_, find_peer());
  }
  std::unique_ptr<RpcChannel> for_rpc() const override;
  Path path_to(const Range&, int) const override {
    return {"copy", "this process", "it is a copy within this process"};
  }
  std::vector<RegionTable::Listed> list_regions(const Limit&) override;
  RunsInCaller* runs_in_caller() override { return this; }

 private:
  std::optional<Outcome> run(const Work& work, const Limit& limit) override;
  bool maps_memory() const override { return true; }

  std::shared_ptr<Endpoint> find_peer() const;  // throws Failure once it is closed
  // `queue`: null if it must not be one for GPUs; then false if it is.
  bool carry_out(const Work& work, const Limit& limit, GpuQueue* queue, Outcome& out) const;

  const std::string own_name_;
  const std::weak_ptr<Endpoint> peer_;
  Outcome outcome_;
  GpuQueue queue_;
};

}  // namespace mk::transfer
