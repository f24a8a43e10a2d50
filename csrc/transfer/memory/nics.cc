#include "transfer/memory/nics.h"

#include <exception>
#include <utility>

#include "common/check.h"
#include "common/numa.h"

namespace mk::transfer {

static_assert(rdma::kLocalWrite == kLocalWrite && rdma::kRemoteRead == kRemoteRead &&
              rdma::kRemoteWrite == kRemoteWrite);

namespace {

// The set when a NIC is left out and those after it are renumbered.
NicSet without(NicSet set, size_t nic) {
  const NicSet before = (NicSet{1} << nic) - 1;
  return (set & before) | (set >> 1 & ~before);
}

// On those that can, and why others cannot. No regions: none can.
NicMemory register_each(const std::vector<std::shared_ptr<rdma::Device>>& devices, rdma::Span span,
                        const rdma::RegisterOptions& options) {
  NicMemory memory{};
  bool is_any = false;
  for (const std::shared_ptr<rdma::Device>& device : devices) {
    rdma::RegionRef& region = memory.regions.emplace_back();
    try {
      region = rdma::register_memory({device}, span, options).front();
      is_any = true;
    } catch (const std::exception& error) {
      const char* const separator = memory.note.empty() ? "" : "; ";
      memory.note += concat(separator, "not on ", device->name(), ": ", error.what());
    }
  }
  if (!is_any) memory.regions.clear();
  return memory;
}

}  // namespace

Nics::Nics(const std::vector<NicOptions>& options, NearNics near, bool required)
    : near_(std::move(near)) {
  MK_CHECK(options.size() <= kMaxNics, "TransferEngine: topology must have at most ", kMaxNics,
           " NICs, got ", options.size());
  std::exception_ptr first_error;
  for (const NicOptions& nic : options) {
    try {
      const std::shared_ptr<rdma::Device> device = rdma::Device::open(nic.name);
      const rdma::DeviceInfo& info = device->info();
      const std::string why_not = rdma::why_unusable(info.node_type, info.vendor_id);
      if (!why_not.empty()) throw Unavailable(why_not);
      const size_t num_ports = info.ports.size();
      MK_CHECK(nic.port >= 1 && static_cast<size_t>(nic.port) <= num_ports,
               "TransferEngine: topology must give ", nic.name, " a port in 1 to ", num_ports,
               ", got ", nic.port);
      nics_.push_back({device, nic.port, nic.gb_per_s, nic.packets});
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

bool is_active(const Nic& nic) {
  try {
    active_port(nic);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

rdma::QueuePairOptions queue_pair_options(const Nic& nic) {
  rdma::QueuePairOptions options;
  options.port = nic.port;
  options.gid_index = nic.packets.gid_index;
  return options;
}

rdma::ConnectOptions connect_options(const Nic& nic) {
  rdma::ConnectOptions options;
  options.traffic_class = nic.packets.traffic_class;
  options.service_level = nic.packets.service_level;
  return options;
}

NicMemoryRef Nics::add(const Range& range, Rights rights, int device) const {
  if (nics_.empty()) return nullptr;
  std::vector<std::shared_ptr<rdma::Device>> devices;
  for (const Nic& nic : nics_) devices.push_back(nic.device);
  rdma::RegisterOptions options;
  options.access = rights | rdma::kRelaxedOrdering;
  const rdma::Span span{range.address, range.num_bytes};
  NicMemory memory;
  try {
    memory.regions = rdma::register_memory(devices, span, options);
  } catch (const std::exception&) {
    if (devices.size() == 1) throw;
    const std::exception_ptr error = std::current_exception();
    memory = register_each(devices, span, options);
    if (memory.regions.empty()) std::rethrow_exception(error);
  }
  NicSet there = 0;
  for (size_t i = 0; i < nics_.size(); ++i) there |= NicSet{memory.regions[i] != nullptr} << i;
  const NicSet near = near_of(range, device) & there;
  memory.near = near != 0 ? near : there;
  return std::make_shared<NicMemory>(std::move(memory));
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
  for (const rdma::RegionRef& region : memory.regions) {
    if (region) region->close();
  }
}

void Nics::close() noexcept {
  for (const Nic& nic : nics_) nic.device->close();
}

}  // namespace mk::transfer
