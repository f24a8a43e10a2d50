// StreamTransfers: requests of an engine that CUDA streams carry out: each begins when its stream
// arrives at it, and the stream goes on when it has ended, whatever its result.
//
//   const auto transfers = std::make_shared<StreamTransfers>(engine);
//   transfers->enqueue(stream, peer, std::move(request), 30.0, /*key=*/1);
//   for (const auto& [key, failure] : transfers->take(Deadline::never())) ...   // has ended
//   transfers->check();                                                         // throws
//   TransferError
//
// Layer: transfer. Thread-safe. A stream cannot be told of a failure: what is behind it in the
// stream runs all the same. So none of the others that are enqueued by then begins, lest a flag
// arrive without its data, and no further ones are accepted, until somebody has been told.
//
// The stream waits in a host function (see gpu/host_function.h), which must not depend on a GPU. So
// no range may be one that a GPU has to copy: of a GPU, except over NICs alone. The caller vouches
// for the peer's.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transfer/engine/engine.h"

namespace mk::transfer {

class StreamTransfers : public std::enable_shared_from_this<StreamTransfers> {
 public:
  explicit StreamTransfers(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  StreamTransfers(const StreamTransfers&) = delete;

  // The deadline counts from the moment that the stream arrives. Throws as check(), Engine::submit
  // and call_in_stream, and Unavailable: a GPU would have to copy. Then it is not enqueued.
  void enqueue(uint64_t stream, PeerRef peer, Request request, double deadline_s, uint64_t key);

  // Those that have ended and were not taken, waiting until there is one. Exactly once each, also
  // those that were not begun. Of one that has not ended the driver may still call the function,
  // which keeps this object: take them all before it is dropped.
  std::vector<std::pair<uint64_t, std::string>> take(const Deadline& until);  // failure: "": none

  // Throws the first failure that no one was notified of.
  void check();

 private:
  struct Item {
    std::shared_ptr<StreamTransfers> owner;
    PeerRef peer;
    Request request;
    double deadline_s;
    uint64_t key;
    std::vector<RegionRef> regions;  // the request's: the last reference may call the driver
    uint64_t num_told = 0;
    std::string failure{};
    std::list<Item>::iterator place{};
  };

  static void arrive(void* item) noexcept;
  bool may_begin(const Item& item);
  void end(Item& item, std::optional<TransferError> failure) noexcept;

  const std::shared_ptr<Engine> engine_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Item> enqueued_, ended_;
  std::optional<TransferError> failure_;  // that no one was notified of
  uint64_t num_told_ = 0;
};

}  // namespace mk::transfer
