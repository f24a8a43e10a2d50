#include "transfer/net/endpoint.h"

#include <map>
#include <mutex>

#include "common/check.h"
#include "common/fork.h"

namespace mk::transfer {
namespace {

struct Process {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Endpoint>> endpoints;
};

std::mutex& process_mutex();

// Never destroyed: threads may look up a name while the process exits.
Process& process() {
  static Process* const instance = [] {
    hold_over_fork<process_mutex>();
    return new Process;
  }();
  return *instance;
}

std::mutex& process_mutex() { return process().mutex; }

}  // namespace

void enter_process(const std::shared_ptr<Endpoint>& endpoint) {
  const std::lock_guard lock(process().mutex);
  std::shared_ptr<Endpoint>& place = process().endpoints[endpoint->address];
  const bool free = !place || place->owner.forked();
  MK_CHECK(free, "TransferEngine: name must be free, but ", endpoint->address,
           " is an engine of this process");
  place = endpoint;
}

void leave_process(Endpoint& endpoint) {
  const std::lock_guard lock(process().mutex);
  endpoint.has_left = true;
  const auto found = process().endpoints.find(endpoint.address);
  if (found != process().endpoints.end() && found->second.get() == &endpoint) {
    process().endpoints.erase(found);
  }
}

std::shared_ptr<Endpoint> find_in_process(const std::string& address) {
  const std::lock_guard lock(process().mutex);
  const auto found = process().endpoints.find(address);
  const bool here = found != process().endpoints.end() && !found->second->owner.forked();
  return here ? found->second : nullptr;
}

}  // namespace mk::transfer
