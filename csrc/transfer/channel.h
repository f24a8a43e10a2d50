// Channel: one way to reach one peer. A transport is a subclass of it: local_channel.h,
// tcp_channel.h; the queue, deadlines and cancelling are Peer's, the same for all.
//
// Layer: transfer.
#pragma once

#include <cstdint>

#include "transfer/limit.h"
#include "transfer/request.h"

namespace mk::transfer {

enum class Transport { kLocal, kTcp };

// Why a peer is not opened that was to be a certain instance; Python knows the words.
constexpr char kAnotherEngine[] = "another engine answers there";

class Channel {
 public:
  virtual ~Channel() = default;

  virtual Transport transport() const = 0;

  // Makes sure that the peer is there. Throws Failure.
  virtual void connect(Interrupt& interrupt, const Deadline& deadline) = 0;

  // Leaves the peer; connect() and run() come back to it.
  virtual void disconnect() noexcept = 0;

  // Carries the request out; `num_bytes_done` counts what the peer has confirmed, also when it
  // throws Failure. After it returns or throws, local memory is not touched. The local regions
  // are pinned by the caller, with the same interrupt.
  virtual void run(const Request& request, Interrupt& interrupt, const Deadline& deadline,
                   uint64_t& num_bytes_done) = 0;
};

}  // namespace mk::transfer
