// RedisPublisher: lists objects in a store's directory in Redis, for an engine that stores them
// without this process's Python.
//
//   RedisPublisher publisher(Fd(...), head);
//   if (const auto listed = publisher.publish(keys)) (*listed)[0];
//
// It has one connection, made and logged in by Python, and runs one script, whose command it
// completes: `head` is in RESP and lacks the last argument, the keys. The script answers with a
// byte for each key: 0, it is listed. Any failure ends it, and Python makes another one.
//
// Layer: served. Thread-safe.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/fd.h"
#include "store/layout.h"

namespace mk::served {

class RedisPublisher {
 public:
  RedisPublisher(Fd connection, std::string head, double timeout_s)
      : connection_(std::move(connection)), head_(std::move(head)), timeout_s_(timeout_s) {}

  // Which of the objects are listed now. No value: it is broken, and they may be listed or not.
  std::optional<std::vector<bool>> publish(const std::vector<store::Key>& keys);

  // Why it is broken; empty: it is not. Looks whether the server has closed the connection.
  std::string reason();

 private:
  std::string ask(const std::string& command, size_t num_bytes);
  void fail(const char* why);

  const Fd connection_;
  const std::string head_;
  const double timeout_s_;
  std::mutex mutex_;
  std::string reason_;
};

}  // namespace mk::served
