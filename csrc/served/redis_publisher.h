// RedisPublisher: lists objects in a store's directory in Redis, for an engine that stores them
// without this process's Python.
//
//   RedisPublisher publisher(Fd(...), head, timeout_s, clock_ms);
//   if (const auto listed = publisher.publish(keys)) (*listed)[0];
//
// It has one connection, made and logged in by Python, and runs one script, whose command it
// completes: `head` is in RESP and lacks the last two arguments: until when the command is valid,
// and the keys. The script answers with a byte for each key. Any failure ends it, and Python makes
// another one. What several threads ask at a time becomes one question.
//
// Layer: served. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/fd.h"
#include "store/layout.h"

namespace mk::served {

class RedisPublisher {
 public:
  // `clock_ms`: the server's clock minus CLOCK_MONOTONIC. An answer that takes longer than
  // `timeout_s` is none, and the server does not run the command after three quarters of that.
  RedisPublisher(Fd connection, std::string head, double timeout_s, int64_t clock_ms);

  // Which of at most kMaxRequestKeys objects are listed now. No value: it is broken, and they may
  // be listed or not.
  std::optional<std::vector<bool>> publish(const std::vector<store::Key>& keys);

  // Why it is broken; empty: it is not. Looks whether the server has closed the connection. Does
  // not wait for an answer.
  std::string reason();

  // Whether it is broken because the server did not answer in time.
  bool is_late() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    const std::vector<store::Key>& keys;
    std::optional<std::vector<bool>> listed{};
    bool is_over = false;
  };

  std::vector<Call*> take_calls();
  std::vector<bool> ask(const std::vector<store::Key>& keys) const;
  void fail(const char* why, bool is_late = false);

  const Fd connection_;
  const std::string head_;
  const Clock::duration timeout_;
  const int64_t clock_ms_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call*> waiting_;
  bool is_asking_ = false;
  std::string reason_;
  bool is_late_ = false;
};

}  // namespace mk::served
