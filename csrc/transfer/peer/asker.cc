#include "transfer/peer/asker.h"

#include <algorithm>
#include <utility>

#include "transfer/base/error.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {
namespace {

constexpr size_t kScratchBytes = 64 << 10;  // for what is discarded

}  // namespace

class Reply::Line final : public Connected {
 public:
  Line(std::unique_ptr<Channel> channel, PathCounters& counters)
      : channel(std::move(channel)), counters(counters) {}

  bool take() { return !is_taken_.exchange(true); }
  void let_go() { is_taken_ = false; }

  bool try_disconnect() override {
    if (!take()) return false;
    channel->disconnect();
    let_go();
    return true;
  }

  const std::unique_ptr<Channel> channel;
  PathCounters& counters;

 private:
  std::atomic<bool> is_taken_{true};  // initially by its creator
};

Reply::Reply(std::shared_ptr<Asker> asker, Line& line, uint64_t payload_bytes)
    : asker_(std::move(asker)),
      line_(line),
      counted_(asker_->counters_, payload_bytes > 0 ? Direction::kWrite : Direction::kRead,
               payload_bytes),
      payload_bytes_(payload_bytes) {}

Reply::~Reply() {
  if (asker_->owner_.forked()) return;  // the connection is the parent's
  PathCounters& path = line_.counters;
  const bool writes = payload_bytes_ > 0;  // then the answer is not counted
  const uint64_t num_bytes = writes ? (has_failed_ ? 0 : payload_bytes_) : num_received_;
  (writes ? path.num_bytes_written : path.num_bytes_read) += num_bytes;
  if (num_bytes > 0) path.num_pieces += 1;
  counted_.end(num_bytes, has_failed_);
  asker_->give_back(line_, num_left_ == 0);
}

void Reply::receive(const std::vector<iovec>& parts, const Deadline& deadline) {
  asker_->owner_.check("receive", "reply");
  std::vector<char> scratch;
  std::vector<iovec> all;
  uint64_t num_bytes = 0;
  for (const iovec& part : parts) {
    num_bytes += part.iov_len;
    if (part.iov_base) {
      all.push_back(part);
      continue;
    }
    scratch.resize(kScratchBytes);  // once, so that it is never moved
    for (size_t done = 0; done < part.iov_len; done += kScratchBytes) {
      all.push_back({scratch.data(), std::min(part.iov_len - done, kScratchBytes)});
    }
  }
  MK_CHECK(num_bytes <= num_left_, "receive: parts must be at most the ", num_left_,
           " bytes that are left, got ", num_bytes);
  try {
    line_.channel->receive_answer(all.data(), all.size(), {deadline, asker_->interrupt_});
  } catch (const Inaccessible& fault) {
    num_left_ -= num_bytes;
    asker_->fail(*this, fault.of("local "));
  } catch (const std::exception& error) {
    asker_->fail(*this, cause_of(error));
  }
  num_left_ -= num_bytes;
  num_received_ += num_bytes;
}

Asker::Asker(std::string peer, MakeChannel make, std::shared_ptr<ConnectionPool> pool,
             CountersRef counters)
    : peer_(std::move(peer)),
      make_(std::move(make)),
      pool_(std::move(pool)),
      counters_(std::move(counters)) {}

Asker::~Asker() {
  if (!owner_.forked()) close();
}

std::unique_ptr<Reply> Asker::ask(const Question& question, const Deadline& deadline) {
  MK_CHECK(!question.text.empty() && question.text.size() <= kMaxQuestionBytes, question.op,
           ": question must be 1 to ", kMaxQuestionBytes, " bytes, got ", question.text.size());
  uint64_t num_bytes = 0;
  for (const iovec& part : question.payload) num_bytes += part.iov_len;
  MK_CHECK(num_bytes <= kMaxPayloadBytes, question.op, ": payload must be at most ",
           kMaxPayloadBytes, " bytes, got ", num_bytes);
  Line& line = take(question.op);
  std::unique_ptr<Reply> reply(new Reply(shared_from_this(), line, num_bytes));
  reply->num_left_ = kMaxAnswerBytes;  // unknown yet; on failure the connection is lost
  const Limit limit{deadline, interrupt_};
  try {
    interrupt_.check();
    const bool was_connected = line.channel->connected();
    try {
      reply->num_left_ = begin(line, was_connected, question, limit);
    } catch (const LinkDown&) {
      if (!was_connected || !question.may_repeat) throw;  // else it had closed unnoticed
      reply->num_left_ = begin(line, false, question, limit);
    }
  } catch (const Refused& refused) {
    reply->num_left_ = 0;
    // What may pass is a failure; what the peer does not do, it does not.
    if (refused.kind == FailureKind::kExhausted || refused.kind == FailureKind::kInaccessible ||
        refused.kind == FailureKind::kDevice) {
      throw TransferError(peer_, refused.cause());
    }
    throw Unavailable(concat(question.op, ": ", peer_, ": ", refused.what()));
  } catch (const Inaccessible& fault) {
    fail(*reply, fault.of("local "));
  } catch (const std::exception& error) {
    fail(*reply, cause_of(error));
  }
  reply->has_failed_ = false;
  return reply;
}

uint64_t Asker::begin(Line& line, bool is_connected, const Question& question, const Limit& limit) {
  if (!is_connected) {
    line.channel->disconnect();
    pool_->enter(line, limit);
    line.channel->connect(limit);
  }
  line.visited.store(true, std::memory_order_relaxed);
  return line.channel->ask(question.text, question.payload, limit);
}

void Asker::close() {
  interrupt_.signal({"the peer was closed", FailureKind::kClosed});
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& line : lines_) {
    pool_->leave(*line);                       // first: the pool may be about to disconnect it
    if (line->take()) line->channel->close();  // else its Reply closes it
  }
}

Reply::Line& Asker::take(const char* op) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw TransferError(peer_, {"the peer was closed", FailureKind::kClosed});
  for (const auto& line : lines_) {
    if (line->take()) return *line;
  }
  std::unique_ptr<Channel> channel;
  try {
    channel = make_();
  } catch (const std::exception& error) {
    throw TransferError(peer_, cause_of(error));
  }
  if (!channel) throw Unavailable(concat(op, ": ", peer_, ": ", kNotAsked));
  return *lines_.emplace_back(
      std::make_unique<Line>(std::move(channel), counters_->path("questions")));
}

void Asker::give_back(Line& line, bool is_good) {
  const std::lock_guard lock(mutex_);
  if (!is_good || closed_) {
    closed_ ? line.channel->close() : line.channel->disconnect();
    pool_->leave(line);
  }
  if (!closed_) line.let_go();
}

void Asker::fail(Reply& reply, const Cause& cause) const {
  reply.has_failed_ = true;
  throw TransferError(peer_, cause, reply.num_received_);
}

}  // namespace mk::transfer
