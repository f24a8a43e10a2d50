// Asker: asks a peer's Service, over separate connections, each of which carries one question at a
// time: questions do not wait for transfers, nor transfers for questions.
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
#include "transfer/channel/channel.h"
#include "transfer/net/connection_pool.h"
#include "transfer/request/counters.h"

namespace mk::transfer {

class Asker;

struct Question {
  const char* op;              // its name in errors
  std::string text;            // 1 to kMaxQuestionBytes
  std::vector<iovec> payload;  // follows it; kMaxPayloadBytes at most
  bool may_repeat;             // see Asker::ask
};

// An answer being received. Throws TransferError.
class Reply {
 public:
  Reply(const Reply&) = delete;
  ~Reply();  // what was not received is lost, together with its connection

  uint64_t num_left() const { return num_left_; }
  // At most num_left() bytes; parts without an address are discarded.
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
  using MakeChannel = std::function<std::unique_ptr<Channel>()>;  // as Channel::for_questions()

  Asker(std::string peer, MakeChannel make, std::shared_ptr<ConnectionPool> pool,
        CountersRef counters);
  ~Asker();

  // Returns once the peer has begun to answer. `may_repeat`: asking twice does no harm, for the
  // case that a connection turns out to have ended. Throws TransferError; Unavailable: the peer
  // refuses.
  std::unique_ptr<Reply> ask(const Question& question, const Deadline& deadline);

  // Ends all questions and answers in progress, and refuses further questions.
  void interrupt(const Cause& cause) { interrupt_.signal(cause); }
  void close();  // the same, and closes idle connections; the others end with their replies

 private:
  friend class Reply;
  using Line = Reply::Line;

  Line& take(const char* op);
  uint64_t begin(Line& line, bool is_connected, const Question& question, const Limit& limit);
  void give_back(Line& line, bool is_good);
  [[noreturn]] void fail(Reply& reply, const Cause& cause) const;

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
