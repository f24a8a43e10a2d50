// Channel: one way to reach one peer. A transport is a subclass of it: local_channel.h,
// shm_channel.h, rdma_channel.h, wire_channel.h (tcp), file_channel.h. Works are finished in the
// order in which they are posted; queueing, deadlines, retries and cancelling are the same for all,
// and not its business.
//
// Layer: transfer. One thread at a time, except where it says otherwise.
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
#include "transfer/counters.h"
#include "transfer/error.h"
#include "transfer/limit.h"
#include "transfer/piece.h"
#include "transfer/request.h"

namespace mk::transfer {

enum class Transport { kLocal, kShm, kCudaIpc, kRdma, kTcp, kFile };

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
  bool* notify_begun = nullptr;  // set before anything of the notification is sent
  int num_losses = 0;            // connections that were lost under it
};

// What has come of a work.
struct Outcome {
  uint64_t num_bytes = 0;   // confirmed by the peer
  std::string refusal{};    // the peer has refused it; the channel stays good
  bool is_counted = false;  // the channel has counted the bytes itself, see count_in()
};

// How a channel moves bytes to and from a range of the peer's, and what it has found that says so.
struct Way {
  // "copy", "mapped", "process_vm", "ipc", "nics", "connection", "disk", "staged"
  std::string means{};
  std::string remote{};  // whose memory that is
  std::string why{};     // a sentence
};

// Why a peer is not opened that was to be a certain instance; Python knows the words.
constexpr char kAnotherEngine[] = "another engine answers there";
constexpr char kRegionsNotTold[] = "this transport does not tell regions";
constexpr char kNotAsked[] = "nobody can be asked by this transport";

class Channel {
 public:
  virtual ~Channel() = default;

  virtual Transport transport() const = 0;

  // What it goes by, in statistics: of several channels to a peer, this is the one of that number.
  virtual std::string path(size_t number) const { return concat("lane:", number); }

  // Where to count what goes by several paths of its own, which outlives the channel.
  virtual void count_in(PeerCounters&) {}

  // How many works may be posted and not finished.
  virtual size_t window() const = 0;

  // The most that a piece may be of.
  virtual uint64_t max_piece_bytes() const = 0;

  // Makes sure that the peer is there. Throws Failure.
  virtual void connect(const Limit& limit) = 0;

  // Leaves the peer; connect() comes back to it. What was posted is void: local memory is not
  // touched any more.
  virtual void disconnect() noexcept = 0;

  // Leaves it for good. Idempotent; by whichever thread, once no other uses the channel.
  virtual void close() noexcept { disconnect(); }

  // Whether post() may be called without connect(): connected, and nothing wrong is known.
  virtual bool connected() const = 0;

  // Begins a work, whose local regions are pinned until it is finished, and whose request outlives
  // it. Throws Failure, after which the channel must be disconnected. `interrupt` is the limit's.
  virtual void post(const Work& work, const Limit& limit, Interrupt& interrupt) = 0;

  // Waits for the oldest of the works that were posted. Throws as post().
  virtual Outcome finish(const Limit& limit) = 0;
  // Whether that is over already: then finish() neither waits nor throws.
  virtual bool has_outcome() const { return false; }
  // While it is not: what of it is confirmed.
  virtual uint64_t num_bytes_so_far() const { return 0; }

  // Another one like it, not connected; null: there is none to be had. Any thread.
  virtual std::unique_ptr<Channel> another() const { return nullptr; }

  // The way between local memory, of that GPU or of the host (-1), and a range, of which a kCheck
  // has been asked before.
  virtual Way way_to(const Range&, int /*device*/) const { return {}; }

  // The peer's regions, in the order of their registration; rights are those of peers. Connected,
  // and nothing posted. Throws as post(), and Refused.
  virtual std::vector<RegionTable::Listed> list_regions(const Limit&) {
    throw Refused(kRegionsNotTold);
  }

  // Asks the peer's Service; the answer, of so many bytes, is to be received to its end before
  // anything else. Connected, and nothing posted. The parts are used up. Throws as list_regions().
  virtual uint64_t ask(const std::string& /*question*/, std::vector<iovec> /*payload*/,
                       const Limit&) {
    throw Refused(kNotAsked);
  }
  virtual void receive_answer(iovec* /*parts*/, size_t /*num_parts*/, const Limit&) {}

  // Whether post() of such a request does not wait, so that a caller may do it who then waits, as
  // long as he likes, for answer_fd() to be readable, and if answered(), calls finish(), which does
  // not wait either. spin(): how long to look before a wait sleeps.
  virtual bool answers_callers(const Request&) const { return false; }
  virtual int answer_fd() const { return -1; }
  virtual bool answered() const { return false; }
  virtual std::chrono::microseconds spin() const { return {}; }

  // Whether it is one of the connections of which an engine has only so many.
  virtual bool is_pooled() const { return false; }

  // Whether short works may be passed to run() instead, by any thread, beside what is posted.
  virtual bool runs_here() const { return false; }
  // Nothing: it was not done, and is to be posted.
  virtual std::optional<Outcome> run(const Work&, const Limit&, Interrupt&) { return {}; }
};

}  // namespace mk::transfer
