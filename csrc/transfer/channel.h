// Channel: one way to reach one peer. A transport is a subclass of it: local_channel.h,
// shm_channel.h, wire_channel.h (tcp). It carries out one work after the other, in the order in
// which they are posted; queueing, deadlines, retries and cancelling are the same for all, and not
// its business.
//
// Layer: transfer. One thread at a time, except where it says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "transfer/limit.h"
#include "transfer/piece.h"
#include "transfer/request.h"

namespace mk::transfer {

enum class Transport { kLocal, kShm, kTcp };

// What a channel is asked to do in one go.
struct Work {
  enum class Kind {
    kCheck,   // ask whether all of the request's remote ranges may be used
    kMove,    // move a piece, and hand over the notification after it if with_notify
    kNotify,  // hand over the notification alone
  };
  Kind kind = Kind::kMove;
  const Request* request = nullptr;
  uint64_t request_id = 0;  // counts up from 1, of one peer
  Piece piece{};
  bool with_notify = false;
  int num_losses = 0;  // connections that were lost under it
};

// What has come of a work.
struct Outcome {
  uint64_t num_bytes = 0;  // confirmed by the peer
  std::string refusal{};   // the peer has refused it; the channel stays good
};

// Why a peer is not opened that was to be a certain instance; Python knows the words.
constexpr char kAnotherEngine[] = "another engine answers there";

class Channel {
 public:
  virtual ~Channel() = default;

  virtual Transport transport() const = 0;

  // How many works may be posted and not finished.
  virtual size_t window() const = 0;

  // The most that a piece may be of.
  virtual uint64_t max_piece_bytes() const = 0;

  // Makes sure that the peer is there. Throws Failure.
  virtual void connect(const Limit& limit) = 0;

  // Leaves the peer; connect() comes back to it. What was posted is void: local memory is not
  // touched any more.
  virtual void disconnect() noexcept = 0;

  // Whether post() may be called without connect(): connected, and nothing wrong is known.
  virtual bool connected() const = 0;

  // Begins a work, whose local regions are pinned until it is finished, and whose request outlives
  // it. Throws Failure, after which the channel must be disconnected. `interrupt` is the limit's.
  virtual void post(const Work& work, const Limit& limit, Interrupt& interrupt) = 0;

  // Waits for the oldest of the works that were posted. Throws as post().
  virtual Outcome finish(const Limit& limit) = 0;

  // Whether short works may be passed to run() instead, by any thread, beside what is posted.
  virtual bool runs_here() const { return false; }
  // Nothing: it was not done, and is to be posted.
  virtual std::optional<Outcome> run(const Work&, const Limit&, Interrupt&) { return {}; }
};

}  // namespace mk::transfer
