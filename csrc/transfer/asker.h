// Asker: asks a peer's Service, over connections of its own, of which each carries one question at
// a time: they wait for no transfer, and no transfer waits for them.
//
//   const std::unique_ptr<Reply> reply = asker->ask(question, Deadline::after(5.0));
//   reply->receive(parts, Deadline::after(30.0));   // and so on, until num_left() is 0
//
// Layer: transfer. Thread-safe; a Reply is for one thread at a time.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/owner.h"
#include "transfer/channel.h"
#include "transfer/connection_pool.h"
#include "transfer/counters.h"

namespace mk::transfer {

class Asker;

struct Question {
  const char* op;              // what errors call it
  std::string text;            // 1 to kMaxQuestionBytes
  std::vector<iovec> payload;  // behind it; kMaxPayloadBytes at most
  bool may_repeat;             // see Asker::ask
};

// An answer that is on its way. Throws TransferError.
class Reply {
 public:
  Reply(const Reply&) = delete;
  ~Reply();  // what was not received is lost, and its connection with it

  uint64_t num_left() const { return num_left_; }
  // At most num_left() bytes; what has no address is dropped.
  void receive(const std::vector<iovec>& parts, const Deadline& deadline);

 private:
  friend class Asker;
  class Line;
  Reply(std::shared_ptr<Asker> asker, Line& line, uint64_t payload_bytes);

  const std::shared_ptr<Asker> asker_;
  Line& line_;
  Counted counted_;
  const uint64_t payload_bytes_;
  bool has_failed_ = true;  // until the peer begins to answer
  uint64_t num_left_ = 0;
  uint64_t num_received_ = 0;
};

class Asker : public std::enable_shared_from_this<Asker> {
 public:
  using MakeChannel = std::function<std::unique_ptr<Channel>()>;  // as Channel::another()

  Asker(std::string peer, MakeChannel make, std::shared_ptr<ConnectionPool> pool,
        CountersRef counters);
  ~Asker();

  // Returns once the peer has begun to answer. `may_repeat`: to ask twice is as good as once, as
  // where a connection turns out to have ended. Throws TransferError; Unavailable: it refuses.
  std::unique_ptr<Reply> ask(const Question& question, const Deadline& deadline);

  // Ends what is being asked and answered, and refuses what is asked from now on.
  void interrupt(const std::string& cause) { interrupt_.signal(cause); }
  void close();  // the same, and the connections that nobody uses; the others with their replies

 private:
  friend class Reply;
  using Line = Reply::Line;

  Line& take(const char* op);
  uint64_t begin(Line& line, const Question& question, const Limit& limit);
  void give_back(Line& line, bool is_good);
  [[noreturn]] void fail(Reply& reply, const std::string& cause, const Deadline& deadline) const;

  const std::string peer_;
  const MakeChannel make_;
  const std::shared_ptr<ConnectionPool> pool_;
  const CountersRef counters_;
  const Owner owner_;
  Interrupt interrupt_;
  std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::unique_ptr<Line>> lines_;
};

}  // namespace mk::transfer
