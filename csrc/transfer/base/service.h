// Service: an engine's answers to questions of its peers that are not about its regions. Its owner
// defines their subject; served/object_service.h serves objects of a pool.
//
//   engine.serve(service);                        // null: no answers any more
//   auto reply = peer->ask(question, deadline);   // the other side, see asker.h
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

// A question being answered. It holds resources until it is destroyed: when the answer is sent, or
// the peer is gone.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Where the payload goes, to the last byte; parts without an address are discarded.
  virtual std::vector<iovec> payload() { return {}; }

  // The next part of the payload is at its place. It is in the cache now; a discarded one has no
  // address.
  virtual void arrived(const iovec& part) { (void)part; }

  // The answer, once all of the payload is there; must not change while this lives. At most
  // kMaxAnswerBytes.
  virtual std::vector<iovec> answer() = 0;
};

class Service {
 public:
  virtual ~Service() = default;

  // Throws Refused, or anything else: the peer is told why, and its connection stays usable.
  virtual std::unique_ptr<Exchange> begin(const std::string& question, uint64_t payload_bytes) = 0;
};

// An engine's service, if it has one. Thread-safe.
class ServiceSlot {
 public:
  void set(std::shared_ptr<Service> service) {
    const std::lock_guard lock(mutex_);
    service_.swap(service);
  }
  void end(const Service& service) {  // unless another one has taken its place
    std::shared_ptr<Service> ended;   // destroyed without the lock
    const std::lock_guard lock(mutex_);
    if (service_.get() == &service) ended.swap(service_);
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
