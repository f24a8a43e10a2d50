#include "transfer/endpoint.h"

#include <map>
#include <mutex>

#include "common/check.h"

namespace mk::transfer {
namespace {

struct Process {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Endpoint>> endpoints;
};

// Never destroyed: threads may look a name up while the process ends.
Process& process() {
  static Process* const instance = new Process;
  return *instance;
}

}  // namespace

void enter_process(const std::shared_ptr<Endpoint>& endpoint) {
  const std::lock_guard lock(process().mutex);
  const bool entered = process().endpoints.emplace(endpoint->name, endpoint).second;
  MK_CHECK(entered, "TransferEngine: name must be free, but ", endpoint->name,
           " is an engine of this process");
}

void leave_process(const Endpoint& endpoint) {
  const std::lock_guard lock(process().mutex);
  const auto found = process().endpoints.find(endpoint.name);
  if (found != process().endpoints.end() && found->second.get() == &endpoint) {
    process().endpoints.erase(found);
  }
}

std::shared_ptr<Endpoint> find_in_process(const std::string& name) {
  const std::lock_guard lock(process().mutex);
  const auto found = process().endpoints.find(name);
  return found == process().endpoints.end() ? nullptr : found->second;
}

}  // namespace mk::transfer
