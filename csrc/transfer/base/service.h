// Service: handles the calls of an engine's peers, which are about anything but its regions. Its
// owner defines their subject; served/object_service.h serves objects of a pool.
//
//   engine.serve(service);                           // null: calls are refused from now on
//   auto response = peer->call(request, deadline);   // the other side, see rpc_client.h
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

// A call being handled. It holds resources until it is destroyed: when the response is sent, or the
// peer is gone.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Where the payload goes, to the last byte; parts without an address are discarded.
  virtual std::vector<iovec> payload() { return {}; }

  // The next part of the payload is at its place. It is in the cache now; a discarded one has no
  // address.
  virtual void arrived(const iovec& part) { (void)part; }

  // The response, once all of the payload is there; must not change while this lives. At most
  // kMaxRpcResponseBytes.
  virtual std::vector<iovec> response() = 0;
};

class Service {
 public:
  virtual ~Service() = default;

  // Throws Refused, or anything else: the peer is notified why, and its connection stays usable.
  virtual std::unique_ptr<Exchange> begin(const std::string& request, uint64_t payload_bytes) = 0;
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
