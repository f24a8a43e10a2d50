// Binds RDMA. Ranges are passed as three uint64 arrays, without a Python object per block; the GIL
// is released around everything that calls the kernel or waits.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "common/check.h"
#include "host/gil.h"
#include "host/module.h"
#include "rdma/completion_queue.h"
#include "rdma/gpu_memory.h"
#include "rdma/queue_pair.h"
#include "rdma/registration_cache.h"

namespace py = pybind11;

namespace mk::host {

namespace {

using namespace mk::rdma;
using namespace py::literals;  // NOLINT
using Column = py::array_t<uint64_t, py::array::c_style>;
using Devices = std::vector<std::shared_ptr<Device>>;

py::bytes gid_bytes(const Gid& gid) {
  return {reinterpret_cast<const char*>(gid.data()), gid.size()};
}

py::dict to_dict(const PortInfo& port) {
  py::list gids;
  for (const GidInfo& gid : port.gids) {
    gids.append(py::dict("index"_a = gid.index, "gid"_a = gid_bytes(gid.gid), "type"_a = gid.type,
                         "interface"_a = gid.interface));
  }
  return py::dict("number"_a = port.number, "state"_a = port.state,
                  "link_layer"_a = port.link_layer, "active_mtu"_a = port.active_mtu,
                  "max_mtu"_a = port.max_mtu, "max_message_bytes"_a = port.max_message_bytes,
                  "lid"_a = port.lid, "gids"_a = gids);
}

py::dict to_dict(const DeviceInfo& info) {
  py::list ports;
  for (const PortInfo& port : info.ports) ports.append(to_dict(port));
  return py::dict("name"_a = info.name, "node_type"_a = info.node_type,
                  "node_guid"_a = info.node_guid, "firmware"_a = info.firmware,
                  "vendor_id"_a = info.vendor_id, "max_mr_bytes"_a = info.max_mr_bytes,
                  "max_mr"_a = info.max_mr, "max_qp"_a = info.max_qp,
                  "max_qp_wr"_a = info.max_qp_wr, "max_sge"_a = info.max_sge,
                  "max_sge_read"_a = info.max_sge_read, "max_cq"_a = info.max_cq,
                  "max_cqe"_a = info.max_cqe, "max_reads_in"_a = info.max_reads_in,
                  "max_reads_out"_a = info.max_reads_out, "ports"_a = ports);
}

py::list devices() {
  std::vector<DeviceInfo> infos;
  {
    const GilReleased released;
    infos = list_devices();
  }
  py::list list;
  for (const DeviceInfo& info : infos) list.append(to_dict(info));
  return list;
}

RegisterOptions register_options(uint32_t access, int gpu_mapping, uint64_t max_piece_bytes) {
  return {access, static_cast<GpuMapping>(gpu_mapping), max_piece_bytes};
}

std::vector<RegionRef> register_on(const Devices& devices, uint64_t address, uint64_t num_bytes,
                                   uint32_t access, int gpu_mapping, uint64_t max_piece_bytes) {
  return register_memory(devices, {address, num_bytes},
                         register_options(access, gpu_mapping, max_piece_bytes));
}

py::list pieces(const MemoryRegion& region) {
  const Resource::Use use(region, "pieces");
  py::list list;
  for (const Piece& piece : region.pieces()) {
    list.append(
        py::make_tuple(piece.span.address, piece.span.num_bytes, piece.mr->lkey, piece.mr->rkey));
  }
  return list;
}

std::shared_ptr<RemoteRegion> make_remote(
    uint32_t access, const std::vector<std::tuple<uint64_t, uint64_t, uint32_t>>& pieces) {
  MK_CHECK(!pieces.empty(), "RemoteRegion: pieces must not be empty");
  auto remote = std::make_shared<RemoteRegion>();
  remote->access = access;
  remote->span.address = std::get<0>(pieces.front());
  for (const auto& [address, num_bytes, rkey] : pieces) {
    MK_CHECK(num_bytes > 0 && address == remote->span.end() && num_bytes <= UINT64_MAX - address,
             "RemoteRegion: pieces must continue each other, got ", num_bytes, " bytes at ",
             address, " after ", remote->span.end());
    remote->pieces.push_back({{address, num_bytes}, rkey});
    remote->span.num_bytes += num_bytes;
  }
  return remote;
}

py::tuple to_tuple(const Endpoint& e) {
  return py::make_tuple(e.qp_num, e.psn, e.lid, gid_bytes(e.gid), e.gid_type, e.link_layer, e.mtu,
                        e.max_reads_in);
}

void connect(QueuePair& pair, uint32_t qp_num, uint32_t psn, uint16_t lid, const std::string& gid,
             std::string gid_type, std::string link_layer, int mtu, int max_reads_in, int timeout,
             int retries, int rnr_retries, int traffic_class, int service_level) {
  Endpoint peer{qp_num, psn,         lid, {}, std::move(gid_type), std::move(link_layer),
                mtu,    max_reads_in};
  MK_CHECK(gid.size() == peer.gid.size(), "connect: peer must have a GID of 16 bytes, got ",
           gid.size());
  std::copy(gid.begin(), gid.end(), peer.gid.begin());
  const GilReleased released;
  pair.connect(peer, {timeout, retries, rnr_retries, traffic_class, service_level});
}

void submit(QueuePair& pair, bool reads, RegionRef region, std::shared_ptr<RemoteRegion> remote,
            const Column& local, const Column& remotes, const Column& sizes,
            std::optional<uint32_t> immediate, uint64_t token) {
  const size_t count = local.size();
  MK_CHECK(
      static_cast<size_t>(remotes.size()) == count && static_cast<size_t>(sizes.size()) == count,
      "submit: the arrays must be of one length, got ", count, ", ", remotes.size(), " and ",
      sizes.size());
  const uint64_t *from = local.data(), *to = remotes.data(), *bytes = sizes.data();
  const GilReleased released;
  Transfer transfer{reads, std::move(region), std::move(remote), {}, immediate, token};
  transfer.segments.reserve(count);
  for (size_t i = 0; i < count; ++i) transfer.segments.push_back({from[i], to[i], bytes[i]});
  pair.submit(transfer);
}

py::list poll(CompletionQueue& queue, int max_work) {
  std::vector<Completion> completions;
  {
    const GilReleased released;
    completions = queue.poll(max_work);
  }
  py::list list;
  for (const Completion& c : completions) {
    const bool immediate = c.kind == Completion::Kind::kImmediate;
    list.append(py::make_tuple(immediate, c.token, c.qp_num, c.status, c.vendor_error, c.immediate,
                               c.num_bytes));
  }
  return list;
}

py::dict port(const Device& device, int number) {
  PortInfo info;
  {
    const GilReleased released;
    info = device.port(number);
  }
  return to_dict(info);
}

py::object wait_event(Device& device, double timeout_s) {
  std::optional<AsyncEvent> event;
  {
    const GilReleased released;
    event = device.wait_event(timeout_s);
  }
  if (!event) return py::none();
  return py::make_tuple(event->type, event->port, event->qp_num);
}

py::dict to_dict(const CacheStats& s) {
  return py::dict("num_hits"_a = s.num_hits, "num_misses"_a = s.num_misses,
                  "num_evictions"_a = s.num_evictions, "num_invalidations"_a = s.num_invalidations,
                  "num_regions"_a = s.num_regions, "num_leased"_a = s.num_leased,
                  "num_bytes"_a = s.num_bytes);
}

std::shared_ptr<RegistrationCache> make_cache(Devices devices, uint32_t access, int gpu_mapping,
                                              uint64_t max_bytes, uint64_t max_regions) {
  const CacheOptions options{register_options(access, gpu_mapping, 0), max_bytes, max_regions};
  return std::make_shared<RegistrationCache>(std::move(devices), options);
}

template <class T>
void bind_close(py::class_<T, std::shared_ptr<T>>& type) {
  type.def("close", &T::close, ReleaseGil());
  if constexpr (std::is_base_of_v<Resource, T>) {
    type.def_property_readonly("closed", &T::is_closed);
  }
}

void bind_device(py::module_& m) {
  py::class_<Device, std::shared_ptr<Device>> device(m, "RdmaDevice");
  bind_close(device);
  device.def_property_readonly("name", &Device::name)
      .def_property_readonly("info", [](const Device& d) { return to_dict(d.info()); })
      .def("port", &port, py::arg("number"))
      .def("wait_event", &wait_event, py::arg("timeout_s"))
      .def(
          "completion_queue",
          [](const std::shared_ptr<Device>& d, int depth) {
            return CompletionQueue::make(d, depth);
          },
          py::arg("depth"), ReleaseGil());
  m.def("rdma_devices", &devices);
  m.def("rdma_why_unusable", &why_unusable, py::arg("node_type"), py::arg("pci_vendor"));
  m.def("rdma_open", &Device::open, py::arg("name"), ReleaseGil());
  m.def(
      "rdma_borrow",
      [](uint64_t context, uint64_t pd) {
        return Device::borrow(reinterpret_cast<ibv_context*>(context),
                              reinterpret_cast<ibv_pd*>(pd));
      },
      py::arg("context"), py::arg("pd"), ReleaseGil());
}

void bind_region(py::module_& m) {
  py::class_<MemoryRegion, RegionRef> region(m, "RdmaRegion");
  bind_close(region);
  region
      .def_property_readonly("mapping",
                             [](const MemoryRegion& r) { return mapping_name(r.mapping()); })
      .def_property_readonly("note", &MemoryRegion::note)
      .def("pieces", &pieces);
  py::class_<RemoteRegion, std::shared_ptr<RemoteRegion>>(m, "RdmaRemoteRegion")
      .def(py::init(&make_remote), py::arg("access"), py::arg("pieces"));
  m.def("rdma_register", &register_on, py::arg("devices"), py::arg("address"), py::arg("num_bytes"),
        py::arg("access"), py::arg("gpu_mapping"), py::arg("max_piece_bytes"), ReleaseGil());
  m.def(
      "rdma_register_dmabuf",
      [](const std::shared_ptr<Device>& device, int fd, uint64_t offset, uint64_t address,
         uint64_t num_bytes, uint32_t access) {
        return register_dmabuf(device, fd, offset, {address, num_bytes}, access);
      },
      py::arg("device"), py::arg("fd"), py::arg("offset"), py::arg("address"), py::arg("num_bytes"),
      py::arg("access"), ReleaseGil());
  m.def("rdma_flush_writes", &flush_writes, py::arg("device"), ReleaseGil());
}

void bind_queues(py::module_& m) {
  py::class_<CompletionQueue, std::shared_ptr<CompletionQueue>> queue(m, "RdmaCompletionQueue");
  bind_close(queue);
  queue.def("poll", &poll, py::arg("max_work"))
      .def("wait", &CompletionQueue::wait, py::arg("timeout_s"), py::arg("spin_s"), ReleaseGil())
      .def("wake", &CompletionQueue::wake, ReleaseGil())
      .def(
          "queue_pair",
          [](const std::shared_ptr<CompletionQueue>& q, int port, int gid_index, int max_sends,
             int max_sges, int max_immediates) {
            return QueuePair::make(q, {port, gid_index, max_sends, max_sges, max_immediates});
          },
          py::arg("port"), py::arg("gid_index"), py::arg("max_sends"), py::arg("max_sges"),
          py::arg("max_immediates"), ReleaseGil());
  py::class_<QueuePair, std::shared_ptr<QueuePair>> pair(m, "RdmaQueuePair");
  bind_close(pair);
  pair.def_property_readonly("number", &QueuePair::number)
      .def_property_readonly("connected", &QueuePair::is_connected)
      .def_property_readonly("endpoint", [](const QueuePair& p) { return to_tuple(p.endpoint()); })
      .def("connect", &connect)
      .def("reset", &QueuePair::reset, ReleaseGil())
      .def("submit", &submit, py::arg("reads"), py::arg("region"), py::arg("remote"),
           py::arg("local").noconvert(), py::arg("remotes").noconvert(),
           py::arg("sizes").noconvert(), py::arg("immediate").none(true), py::arg("token"));
  m.def("rdma_status_text", &status_text);
}

void bind_cache(py::module_& m) {
  using Lease = RegistrationCache::Lease;
  py::class_<Lease, std::shared_ptr<Lease>> lease(m, "RdmaLease");
  bind_close(lease);
  lease.def_property_readonly("regions", &Lease::regions)
      .def_property_readonly("address", [](const Lease& l) { return l.span().address; })
      .def_property_readonly("num_bytes", [](const Lease& l) { return l.span().num_bytes; });
  py::class_<RegistrationCache, std::shared_ptr<RegistrationCache>> cache(m,
                                                                          "RdmaRegistrationCache");
  bind_close(cache);
  cache
      .def(py::init(&make_cache), py::arg("devices"), py::arg("access"), py::arg("gpu_mapping"),
           py::arg("max_bytes"), py::arg("max_regions"))
      .def(
          "acquire",
          [](RegistrationCache& c, uint64_t address, uint64_t num_bytes) {
            return c.acquire({address, num_bytes});
          },
          py::arg("address"), py::arg("num_bytes"), ReleaseGil())
      .def(
          "invalidate",
          [](RegistrationCache& c, uint64_t address, uint64_t num_bytes) {
            return c.invalidate({address, num_bytes});
          },
          py::arg("address"), py::arg("num_bytes"), ReleaseGil())
      .def("stats", [](const RegistrationCache& c) { return to_dict(c.stats()); });
}

}  // namespace

void bind_rdma(py::module_& m) {
  bind_device(m);
  bind_region(m);
  bind_queues(m);
  bind_cache(m);
}

}  // namespace mk::host
