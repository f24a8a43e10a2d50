// Binds the transfer engine. The GIL is released around everything that blocks or copies, and no
// thread of the engine ever takes it.
#include "transfer/engine/engine.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/shared_memory.h"
#include "host/gil.h"
#include "host/module.h"
#include "host/served.h"
#include "host/transfer_requests.h"
#include "host/transfer_stats.h"
#include "transfer/base/error.h"

namespace py = pybind11;

namespace mk::host {
namespace {

using namespace mk::transfer;

constexpr double kSignalCheckS = 0.1;  // maximum delay of Ctrl-C during a wait

// An array; None: there are no descriptors.
py::object array_of(const std::vector<bool>& flags) {
  if (flags.empty()) return py::none();
  py::array_t<bool> array(static_cast<py::ssize_t>(flags.size()));
  std::copy(flags.begin(), flags.end(), array.mutable_data());
  return array;
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const TransferError& e) {
    raise("TransferError", py::make_tuple(e.peer, e.reason.text, e.num_bytes_done,
                                          e.num_bytes_total, static_cast<int>(e.reason.kind),
                                          e.only_notification_missing, array_of(e.delivered)));
  }
}

// As passed from Python: (certificate, key, ca, verify_host).
using TlsFiles = std::tuple<std::string, std::string, std::string, bool>;

using NicTuple = std::tuple<std::string, int, double>;  // name, port, GB/s
using PacketTuple = std::tuple<int, int, int>;          // GID index, traffic class, service level

Credentials credentials_of(const std::optional<std::string>& secret, bool secret_only,
                           const std::optional<TlsFiles>& tls,
                           const std::vector<uid_t>& local_users) {
  Credentials credentials;
  credentials.local_users = LocalUsers(local_users);
  if (secret) credentials.secret = std::make_shared<const Secret>(*secret);
  if (secret && !tls && !secret_only) {
    credentials.tls = std::make_shared<const TlsContext>(credentials.secret->psk());
  }
  if (tls) {
    const auto& [certificate, key, ca, verify_host] = *tls;
    credentials.tls =
        std::make_shared<const TlsContext>(TlsOptions{certificate, key, ca, verify_host});
  }
  return credentials;
}

std::shared_ptr<Engine> make_engine(
    const std::string& name, const std::string& listen, bool local, bool shm, bool cuda_ipc,
    bool tcp, bool file, const std::vector<NicTuple>& nics, const std::vector<NicSet>& near_nodes,
    const std::vector<NicSet>& near_gpus, bool nics_required, const PacketTuple& packets,
    int num_lanes, size_t max_connections, int64_t spin_us,
    const std::optional<std::string>& secret, bool secret_only, const std::optional<TlsFiles>& tls,
    const std::vector<uid_t>& local_users, const std::vector<std::string>& reached_at) {
  const auto delete_in_owner = [](Engine* engine) {
    if (!engine->forked()) delete engine;
  };
  std::vector<NicOptions> options;
  const auto [gid_index, traffic_class, service_level] = packets;
  for (const auto& [nic, port, gb_per_s] : nics) {
    options.push_back({nic, port, gb_per_s, {gid_index, traffic_class, service_level}});
  }
  return {new Engine({name,
                      listen,
                      local,
                      shm,
                      cuda_ipc,
                      tcp,
                      file,
                      std::move(options),
                      {near_nodes, near_gpus},
                      nics_required,
                      num_lanes,
                      max_connections,
                      std::chrono::microseconds(spin_us),
                      credentials_of(secret, secret_only, tls, local_users),
                      reached_at}),
          delete_in_owner};
}

// A region as Python holds it: made before it is registered, so that it shows whether it has been
// when a signal's handler raises an exception in place of the call's return.
struct RegionHandle {
  RegionRef region;  // null: not registered
};

Rights rights_of(bool writable, bool remote_read, bool remote_write, bool remote_windows) {
  return (writable ? kLocalWrite : 0) | (remote_read ? kRemoteRead : 0) |
         (remote_write ? kRemoteWrite : 0) | (remote_windows ? kRemoteWindows : 0);
}

// Once, whichever thread comes first.
void close_window(Engine& engine, RegionHandle& handle) {
  const RegionRef window = std::exchange(handle.region, nullptr);
  const GilReleased released;
  if (window) engine.close_window(window);
}

// Calls `wait(until)` in slices, checking for signals in between, until it returns true or the time
// is up.
template <class Wait>
bool wait_in_slices(std::optional<double> timeout_s, Wait wait) {
  const Deadline until = timeout_s ? Deadline::after(*timeout_s) : Deadline::never();
  while (true) {
    {
      const GilReleased released;
      const Deadline slice = Deadline::after(kSignalCheckS);
      if (wait(slice.at() < until.at() ? slice : until)) return true;
    }
    if (until.passed()) return false;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

template <class Begin>
PeerRef open_by(Engine& engine, Begin begin) {
  PeerRef peer;
  try {
    wait_in_slices(std::nullopt, [&](const Deadline& until) {
      if (!peer) peer = begin();
      return peer->wait_connected(until);
    });
  } catch (...) {
    const GilReleased released;
    if (peer) engine.close_peer(peer);
    throw;
  }
  return peer;
}

PeerRef open(Engine& engine, const std::string& name, const std::string& address, uint64_t instance,
             double deadline_s) {
  return open_by(engine, [&] { return engine.open({name, address, instance}, deadline_s); });
}

PeerRef open_file(Engine& engine, const std::string& name, const std::string& place,
                  double deadline_s) {
  return open_by(engine, [&] { return engine.open_file(name, place, deadline_s); });
}

bool wait_ticket(Ticket& ticket, std::optional<double> timeout_s) {
  if (ticket.is_over()) {  // e.g. carried out in the caller's thread
    ticket.check();
    return true;
  }
  const bool finished =
      wait_in_slices(timeout_s, [&](const Deadline& until) { return ticket.wait(until); });
  if (finished) ticket.check();
  return finished;
}

py::list list_of(const std::vector<Notification>& notifications) {
  py::list list;
  for (const Notification& item : notifications)
    list.append(py::make_tuple(item.peer, py::bytes(item.bytes)));
  return list;
}

py::list take_notifications(Engine& engine, double timeout_s) {
  std::vector<Notification> taken;
  engine.accept_notifications();
  wait_in_slices(timeout_s, [&](const Deadline& until) {
    taken = engine.take_notifications(until);
    return !taken.empty();
  });
  return list_of(taken);
}

}  // namespace

const char* transport_name(Transport transport) {
  switch (transport) {
    case Transport::kLocal:
      return "local";
    case Transport::kShm:
      return "shm";
    case Transport::kCudaIpc:
      return "cuda_ipc";
    case Transport::kRdma:
      return "rdma";
    case Transport::kFile:
      return "file";
    case Transport::kTcp:
      break;
  }
  return "tcp";
}

void bind_transfer(py::module_& m) {
  py::register_exception_translator(translate);
  py::class_<RegionHandle>(m, "TransferRegion")
      .def(py::init<>())
      .def_property_readonly("note",
                             [](const RegionHandle& handle) { return handle.region->note; });
  py::class_<Peer, PeerRef>(m, "TransferPeer")
      .def_property_readonly("name", &Peer::name)
      .def_property_readonly("transport",
                             [](const Peer& peer) { return transport_name(peer.transport()); });
  py::class_<CompletionQueue, std::shared_ptr<CompletionQueue>>(m, "TransferCompletionQueue")
      .def(py::init<>())
      .def_property_readonly("fd", &CompletionQueue::fd)
      .def("take", &CompletionQueue::take);
  py::class_<Ticket, TicketRef>(m, "TransferTicket")
      .def_property_readonly("num_bytes", &Ticket::num_bytes)
      .def_property_readonly("remaining_s", [](const Ticket& t) { return t.deadline().left_s(); })
      .def_property_readonly("ended_s", &Ticket::ended_s)
      .def("finished", &Ticket::finished, ReleaseGil())
      .def("wait", &wait_ticket, py::arg("timeout_s").none(true))
      .def("cancel", &Ticket::cancel, ReleaseGil())
      .def("push_when_finished", &Ticket::push_when_finished, py::arg("queue"), py::arg("key"),
           ReleaseGil());
  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol())
      .def(py::init<uint64_t>(), py::arg("num_bytes"))
      .def_buffer([](const SharedMemory& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.num_bytes()));
      });
  EngineClass engine(m, "TransferEngine");
  engine
      .def(py::init(&make_engine), py::arg("name"), py::arg("listen"), py::arg("local"),
           py::arg("shm"), py::arg("cuda_ipc"), py::arg("tcp"), py::arg("file"), py::arg("nics"),
           py::arg("near_nodes"), py::arg("near_gpus"), py::arg("nics_required"),
           py::arg("packets"), py::arg("num_lanes"), py::arg("max_connections"), py::arg("spin_us"),
           py::arg("secret").none(true), py::arg("secret_only"), py::arg("tls").none(true),
           py::arg("local_users"), py::arg("reached_at"), ReleaseGil())
      .def_property_readonly("name", &Engine::name)
      .def_property_readonly("address", &Engine::address)
      .def_property_readonly("instance", &Engine::instance)
      .def_property_readonly("missing_nics", &Engine::missing_nics)
      .def("check_process", &Engine::check_process, py::arg("op"))
      .def(
          "add_region",
          [](Engine& engine, RegionHandle& handle, uint64_t address, uint64_t num_bytes,
             bool writable, bool remote_read, bool remote_write, bool remote_windows, int device) {
            const Rights rights = rights_of(writable, remote_read, remote_write, remote_windows);
            handle.region = engine.add_region({address, num_bytes}, rights, device);
          },
          py::arg("region"), py::arg("address"), py::arg("num_bytes"), py::arg("writable"),
          py::arg("remote_read"), py::arg("remote_write"), py::arg("remote_windows"),
          py::arg("device"), ReleaseGil())
      .def(
          "remove_region",
          [](Engine& engine, const RegionHandle& handle) {
            return !handle.region || engine.remove_region(handle.region);
          },
          py::arg("region"), ReleaseGil())
      .def(
          "open_window",
          [](Engine& engine, RegionHandle& window, const RegionHandle& region, uint64_t address,
             uint64_t num_bytes) {
            window.region = engine.open_window(region.region, {address, num_bytes});
          },
          py::arg("window"), py::arg("region"), py::arg("address"), py::arg("num_bytes"),
          ReleaseGil())
      .def("close_window", &close_window, py::arg("window"))
      .def("open", &open, py::arg("name"), py::arg("address"), py::arg("instance"),
           py::arg("deadline_s"))
      .def("open_file", &open_file, py::arg("name"), py::arg("place"), py::arg("deadline_s"))
      .def("close_peer", &Engine::close_peer, py::arg("peer"), ReleaseGil())
      .def("sync", &Engine::sync, py::arg("peer"), py::arg("deadline_s"), ReleaseGil())
      .def("take_notifications", &take_notifications, py::arg("timeout_s"))
      .def("refuse_notifications",
           [](Engine& engine) { return list_of(engine.refuse_notifications()); })
      .def("stats", &stats)
      .def("list_regions", &list_regions, py::arg("peer"), py::arg("deadline_s"))
      .def("explain_path", &explain_path, py::arg("peer"), py::arg("local"), py::arg("remote"),
           py::arg("num_bytes"), py::arg("deadline_s"))
      .def("rejections", &Engine::rejections)
      .def("close", &Engine::close, ReleaseGil());
  bind_requests(m, engine);
  bind_served_objects(m, engine);
}

}  // namespace mk::host
