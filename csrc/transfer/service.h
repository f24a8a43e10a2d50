// Service: what an engine answers to questions of its peers that are not about its regions. What
// they are about is its owner's business; served/object_service.h serves objects of a pool.
//
//   engine.serve(service);                                         // null: nothing any more
//   auto reply = peer->ask(question, deadline);           // the other side, see asker.h
//
// Layer: transfer. Called by the threads of sessions, several at a time.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mk::transfer {

// A question that is being answered. What it holds for that it lets go when it is destroyed: when
// the answer is sent, or the peer has gone.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Where the payload goes, to the last byte; what has no address is thrown away.
  virtual std::vector<iovec> payload() { return {}; }

  // What is answered, once all of the payload is there: it stays as it is for as long as this
  // lives. At most kMaxAnswerBytes.
  virtual std::vector<iovec> answer() = 0;
};

class Service {
 public:
  virtual ~Service() = default;

  // Throws Refused, or anything else: the peer is told why, and its connection stays good.
  virtual std::unique_ptr<Exchange> begin(const std::string& question, uint64_t payload_bytes) = 0;
};

// The one of an engine, if it has any. Thread-safe.
class ServiceSlot {
 public:
  void set(std::shared_ptr<Service> service) {
    const std::lock_guard lock(mutex_);
    service_.swap(service);
  }
  std::shared_ptr<Service> get() const {
    const std::lock_guard lock(mutex_);
    return service_;
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Service> service_;
};

}  // namespace mk::transfer
