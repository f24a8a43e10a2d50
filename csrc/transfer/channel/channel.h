// Channel: one connection to one peer. Each transport is a subclass, in a folder of its own: local,
// shm, rdma, tcp (tcp_channel.h), file. Works finish in the order in which they are posted.
// Queueing, deadlines, retries and cancelling are common to all, and are not part of it.
//
// Layer: transfer. One thread at a time, except where stated otherwise.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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
constexpr char kNoRpc[] = "this transport has no channel for questions";

class Channel {
 public:
  virtual ~Channel() = default;

  virtual Transport transport() const = 0;

  // Its path in statistics: for several channels to a peer, that of the channel with this number.
  virtual std::string path(size_t number) const { return concat("lane:", number); }

  // Where to count traffic by several paths of its own; outlives the channel.
  virtual void count_in(PeerCounters&) {}

  // How many works may be posted and unfinished.
  virtual size_t window() const = 0;

  // The largest allowed piece.
  virtual uint64_t max_piece_bytes() const = 0;

  // Ensures that the peer is there. Throws Failure.
  virtual void connect(const Limit& limit) = 0;

  // Leaves the peer; connect() reconnects. Posted works are void: local memory is not touched any
  // more.
  virtual void disconnect() noexcept = 0;

  // Leaves it permanently. Idempotent; by any thread, once no other uses the channel.
  virtual void close() noexcept { disconnect(); }

  // Whether post() may be called without connect(): connected, with no known error.
  virtual bool connected() const = 0;

  // Begins a work. Its local regions are pinned until it is finished, and its request outlives it.
  // Throws Failure, after which the channel must be disconnected.
  virtual void post(const Work& work, const Limit& limit) = 0;

  // Waits for the oldest posted work. Throws as post().
  virtual Outcome finish(const Limit& limit) = 0;
  // Whether it has already finished: then finish() neither waits nor throws.
  virtual bool has_outcome() const { return false; }
  // If it has not: how much of it is confirmed.
  virtual uint64_t num_bytes_so_far() const { return 0; }

  // Another one like it, not connected; null: not available. Any thread.
  virtual std::unique_ptr<Channel> another() const { return nullptr; }
  // The same, of which nothing is used but call() and receive_response().
  virtual std::unique_ptr<Channel> for_rpc() const { return another(); }

  // The way between local memory, of that GPU or of the host (-1), and a range that a kCheck has
  // covered before.
  virtual Path path_to(const Range&, int /*device*/) const { return {}; }

  // The peer's regions, in the order of their registration; rights are those of peers. Connected,
  // and nothing posted. Throws as post(), and Refused.
  virtual std::vector<RegionTable::Listed> list_regions(const Limit&) {
    throw Refused(ErrorReason(kRegionsNotTold, FailureKind::kIncompatible));
  }

  // Calls the peer's Service; the response, of the returned size, must be received completely
  // before anything else. Connected, nothing posted. The parts are used up. Throws as
  // list_regions().
  virtual uint64_t call(const std::string& /*request*/, std::vector<iovec> /*payload*/,
                        const Limit&) {
    throw Refused(ErrorReason(kNoRpc, FailureKind::kIncompatible));
  }
  virtual void receive_response(iovec* /*parts*/, size_t /*num_parts*/, const Limit&) {}

  // Whether a caller may ever post such a request; any thread.
  virtual bool may_answer_callers(const Request&) const { return false; }
  // If so: whether post() of it does not wait now, so that a caller may do it. The caller then
  // waits, as long as it likes, until answer_fd() is readable, and if answered(), calls finish(),
  // which does not wait either. wait_for_all(): from now on it is readable only once all of the
  // answer is there, or there is no room for more; false: what has come may be all of it already.
  // End it by wait_for_any(), before finish(). spin(): how long to poll before a wait sleeps.
  virtual bool answers_callers(const Request&) const { return false; }
  virtual int answer_fd() const { return -1; }
  virtual bool answered() const { return false; }
  virtual bool wait_for_all() { return false; }
  virtual void wait_for_any() {}
  virtual std::chrono::microseconds spin() const { return {}; }

  // Whether it is one of the connections that an engine limits.
  virtual bool is_pooled() const { return false; }

  // Whether any thread may pass short works to run() instead, in parallel with posted works.
  virtual bool runs_in_caller() const { return false; }
  // Whether run() copies by plain loads and stores, which one thread does as fast as two as long as
  // the bytes are in a cache, and wakes no one.
  virtual bool maps_memory() const { return false; }
  // Nothing: it was not done, and must be posted.
  virtual std::optional<Outcome> run(const Work&, const Limit&) { return {}; }

  // What of it is down, though it is connected; any thread.
  virtual std::string trouble() const { return ""; }
};

}  // namespace mk::transfer
