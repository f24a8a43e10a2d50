// Channel: one connection to one peer. Each transport is a subclass, in a folder of its own: local,
// shm, rdma, tcp (tcp_channel.h), file. Works finish in the order in which they are posted.
// Queueing, deadlines, retries and cancelling are common to all, and are not part of it.
//
// Layer: transfer. One thread at a time, except where stated otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/base/limit.h"
#include "transfer/request/counters.h"
#include "transfer/request/piece.h"
#include "transfer/request/request.h"

namespace mk::transfer {

enum class Transport { kLocal, kShm, kCudaIpc, kRdma, kTcp, kFile };

// One operation of a channel.
struct Work {
  enum class Kind {
    kCheck,   // ask whether all of the request's remote ranges may be used
    kMove,    // move a piece, and hand over the notification after it if with_notify
    kNotify,  // hand over only the notification
  };
  Kind kind = Kind::kMove;
  const Request* request = nullptr;
  uint64_t request_id = 0;  // counts up from 1, per peer
  Piece piece{};
  bool with_notify = false;
  bool* notify_begun = nullptr;  // set before anything of the notification is sent
  int num_losses = 0;            // connections that were lost during it

  // Whether its piece has arrived, and been verified where that is required, if that many bytes are
  // confirmed: of a work that failed only if its notification had begun, which comes after both.
  bool has_arrived(uint64_t num_confirmed, bool failed) const {
    return kind == Kind::kMove && num_confirmed == piece.num_bytes && (!failed || *notify_begun);
  }
};

// The result of a work.
struct Outcome {
  uint64_t num_bytes = 0;   // confirmed by the peer
  ErrorReason refusal{};    // why the peer refused it; the channel stays usable
  bool is_counted = false;  // the channel has counted the bytes itself, see count_in()
};

// How a channel moves bytes to and from a range of the peer's, and the findings that show it.
struct Path {
  // "copy", "mapped", "process_vm", "ipc", "nics", "connection", "disk", "staged"
  std::string means{};
  std::string remote{};              // the owner of that memory
  std::string why{};                 // a sentence
  std::vector<std::string> paths{};  // as in statistics; none: the peer's
};

constexpr char kRegionsNotTold[] = "this transport does not tell regions";

class CallerDriven;
class RpcChannel;
class RunsInCaller;

class Channel {
 public:
  virtual ~Channel() = default;

  // What each transport needs:

  virtual Transport transport() const = 0;

  // How many works may be posted and unfinished.
  virtual size_t window() const = 0;

  // The largest allowed piece.
  virtual uint64_t max_piece_bytes() const = 0;

  // Ensures that the peer is there. Throws Failure.
  virtual void connect(const Limit& limit) = 0;

  // Leaves the peer; connect() reconnects. Posted works are void: local memory is not touched any
  // more.
  virtual void disconnect() noexcept = 0;

  // Whether post() may be called without connect(): connected, with no known error.
  virtual bool connected() const = 0;

  // Begins a work. Its local regions are pinned until it is finished, and its request outlives it.
  // Throws Failure, after which the channel must be disconnected.
  virtual void post(const Work& work, const Limit& limit) = 0;

  // Waits for the oldest posted work. Throws as post().
  virtual Outcome finish(const Limit& limit) = 0;

  // What a transport may add:

  // Leaves the peer permanently. Idempotent; by any thread, once no other uses the channel.
  virtual void close() noexcept { disconnect(); }

  // Whether the oldest posted work has already finished: then finish() neither waits nor throws.
  virtual bool has_outcome() const { return false; }
  // If it has not: how much of it is confirmed.
  virtual uint64_t num_bytes_so_far() const { return 0; }

  // Whether it is one of the connections that an engine limits.
  virtual bool is_pooled() const { return false; }

  // Another one like it, not connected; null: not available. Any thread.
  virtual std::unique_ptr<Channel> another() const { return nullptr; }
  // One for calls of the peer's Service, not connected; null: none. Any thread. Throws Failure.
  virtual std::unique_ptr<RpcChannel> for_rpc() const;

  // How callers may carry requests out in their own threads (caller_driven.h); null: not so. The
  // same while the channel exists; any thread.
  virtual CallerDriven* caller_driven() { return nullptr; }
  virtual RunsInCaller* runs_in_caller() { return nullptr; }

  // Its path in statistics: for several channels to a peer, that of the channel with this number.
  virtual std::string path(size_t number) const { return concat("lane:", number); }

  // Where to count traffic by several paths of its own; outlives the channel.
  virtual void count_in(PeerCounters&) {}

  // The path between local memory, of that GPU or of the host (-1), and a range that a kCheck has
  // covered before.
  virtual Path path_to(const Range&, int /*device*/) const { return {}; }

  // The peer's regions, in the order of their registration; rights are those of peers. Connected,
  // and nothing posted. Throws as post(), and Refused.
  virtual std::vector<RegionTable::Listed> list_regions(const Limit&) {
    throw Refused(ErrorReason(kRegionsNotTold, FailureKind::kIncompatible));
  }

  // What of it is down, though it is connected; any thread.
  virtual std::string trouble() const { return ""; }
};

}  // namespace mk::transfer
