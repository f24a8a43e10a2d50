#include "transfer/rdma/nics.h"

#include <exception>
#include <utility>

#include "common/check.h"
#include "common/numa.h"

namespace mk::transfer {

#if MK_HAVE_VERBS
static_assert(rdma::kLocalWrite == kLocalWrite && rdma::kRemoteRead == kRemoteRead &&
              rdma::kRemoteWrite == kRemoteWrite);

namespace {

// The set when a NIC is left out and those after it are renumbered.
NicSet without(NicSet set, size_t nic) {
  const NicSet before = (NicSet{1} << nic) - 1;
  return (set & before) | (set >> 1 & ~before);
}

}  // namespace

Nics::Nics(const std::vector<NicOptions>& options, NearNics near, bool required)
    : near_(std::move(near)) {
  MK_CHECK(options.size() <= kMaxNics, "TransferEngine: topology must have at most ", kMaxNics,
           " NICs, got ", options.size());
  std::exception_ptr first_error;
  for (const NicOptions& nic : options) {
    try {
      nics_.push_back({rdma::Device::open(nic.name), nic.port, nic.gb_per_s});
    } catch (const std::exception& error) {
      if (!first_error) first_error = std::current_exception();
      missing_.push_back(concat(nic.name, ": ", error.what()));
      for (NicSet& set : near_.nodes) set = without(set, nics_.size());
      for (NicSet& set : near_.gpus) set = without(set, nics_.size());
    }
  }
  if (required && nics_.empty() && first_error) std::rethrow_exception(first_error);
}

rdma::PortInfo active_port(const Nic& nic) {
  rdma::PortInfo port = nic.device->port(nic.port);
  if (port.state == "ACTIVE") return port;
  throw Unavailable(concat("port ", nic.port, " of ", nic.device->name(), " is ", port.state));
}

NicMemoryRef Nics::add(const Range& range, Rights rights, int device) const {
  if (nics_.empty()) return nullptr;
  std::vector<std::shared_ptr<rdma::Device>> devices;
  for (const Nic& nic : nics_) devices.push_back(nic.device);
  rdma::RegisterOptions options;
  options.access = rights | rdma::kRelaxedOrdering;
  auto regions = rdma::register_memory(devices, {range.address, range.num_bytes}, options);
  return std::make_shared<NicMemory>(NicMemory{std::move(regions), near_of(range, device)});
}

// Requires registered, hence resident, memory. Returns all NICs if nothing is known.
NicSet Nics::near_of(const Range& range, int device) const {
  NicSet near = 0;
  const auto add = [&near](const std::vector<NicSet>& of, int place) {
    if (static_cast<size_t>(place) < of.size()) near |= of[place];
  };
  if (device >= 0) {
    add(near_.gpus, device);
  } else {
    for (const int node : numa_nodes_of(range.address, range.num_bytes)) add(near_.nodes, node);
  }
  return near != 0 ? near : ~NicSet{0};
}

void Nics::remove(const NicMemory& memory) noexcept {
  for (const rdma::RegionRef& region : memory.regions) region->close();
}

void Nics::close() noexcept {
  for (const Nic& nic : nics_) nic.device->close();
}
#else
Nics::Nics(const std::vector<NicOptions>& options, NearNics, bool) {
  if (!options.empty()) {
    throw Unavailable(
        "TransferEngine: rdma needs a build with infiniband/verbs.h (libibverbs-dev)");
  }
}

NicMemoryRef Nics::add(const Range&, Rights, int) const { return nullptr; }
void Nics::remove(const NicMemory&) noexcept {}
void Nics::close() noexcept {}
#endif

}  // namespace mk::transfer
