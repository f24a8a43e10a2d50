// Binds the transfer engine. Descriptors cross as uint64 arrays, with no Python object per block,
// or as the few tuples that they are; the GIL is released around everything that blocks or copies,
// and no thread of the engine ever takes it.
#include "transfer/engine.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "common/shared_memory.h"
#include "host/gil.h"
#include "host/module.h"
#include "transfer/error.h"

namespace py = pybind11;

namespace mk::host {
namespace {

using namespace mk::transfer;
using Column = py::array_t<uint64_t, py::array::c_style>;

constexpr double kSignalCheckS = 0.1;  // how long Ctrl-C may go unnoticed in a wait

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const TransferError& e) {
    const py::object type = py::module_::import("mooncake_kernels.errors").attr("TransferError");
    const py::object error = type(e.peer, e.cause, e.num_bytes_done, e.num_bytes_total);
    PyErr_SetObject(type.ptr(), error.ptr());
  }
}

// As crosses from Python: (certificate, key, ca, verify_host).
using TlsFiles = std::tuple<std::string, std::string, std::string, bool>;

Credentials credentials_of(const std::optional<std::string>& secret,
                           const std::optional<TlsFiles>& tls) {
  Credentials credentials;
  if (secret) credentials.secret = std::make_shared<const Secret>(*secret);
  if (tls) {
    const auto& [certificate, key, ca, verify_host] = *tls;
    credentials.tls =
        std::make_shared<const TlsContext>(TlsOptions{certificate, key, ca, verify_host});
  }
  return credentials;
}

std::shared_ptr<Engine> make_engine(const std::string& name, const std::string& listen, bool local,
                                    bool shm, bool tcp, bool file, int num_lanes,
                                    const std::optional<std::string>& secret,
                                    const std::optional<TlsFiles>& tls) {
  const auto delete_in_owner = [](Engine* engine) {
    if (!engine->forked()) delete engine;
  };
  return {new Engine({name, listen, local, shm, tcp, file, num_lanes, credentials_of(secret, tls)}),
          delete_in_owner};
}

Rights rights_of(bool writable, bool remote_read, bool remote_write) {
  return (writable ? kLocalWrite : 0) | (remote_read ? kRemoteRead : 0) |
         (remote_write ? kRemoteWrite : 0);
}

Request empty_request(bool reads, std::optional<std::string> notify) {
  Request request{};
  request.direction = reads ? Direction::kRead : Direction::kWrite;
  request.notify = std::move(notify);
  return request;
}

std::vector<uint64_t> numbers(const Column& column) {
  return {column.data(), column.data() + column.size()};
}

TicketRef submit(Engine& engine, Peer& peer, bool reads, const Column& local, const Column& remote,
                 const std::variant<uint64_t, Column>& sizes, std::optional<std::string> notify,
                 double deadline_s) {
  const auto* const each = std::get_if<Column>(&sizes);
  MK_CHECK(remote.size() == local.size() && (!each || each->size() == local.size()),
           "submit: the arrays must be of one length");
  const GilReleased released;
  Request request = empty_request(reads, std::move(notify));
  request.local = numbers(local);
  request.remote = numbers(remote);
  request.sizes = each ? numbers(*each) : std::vector<uint64_t>{std::get<uint64_t>(sizes)};
  request.num_bytes = each
                          ? std::accumulate(request.sizes.begin(), request.sizes.end(), uint64_t{0})
                          : request.sizes[0] * request.num_ranges();
  return engine.submit(peer, std::move(request), deadline_s);
}

// Rows as most callers write them: a list of tuples of three plain integers from 0 to 2**64 - 1.
// Returns null for anything else, which the caller takes the long way, for its errors, too.
TicketRef submit_rows(Engine& engine, Peer& peer, bool reads, const py::list& rows,
                      std::optional<std::string> notify, double deadline_s) {
  Request request = empty_request(reads, std::move(notify));
  std::vector<uint64_t>* const columns[] = {&request.local, &request.remote, &request.sizes};
  for (auto* column : columns) column->reserve(rows.size());
  for (const py::handle row : rows) {
    if (!PyTuple_CheckExact(row.ptr()) || PyTuple_GET_SIZE(row.ptr()) != 3) return nullptr;
    for (int k = 0; k < 3; ++k) {
      PyObject* const item = PyTuple_GET_ITEM(row.ptr(), k);
      if (!PyLong_CheckExact(item)) return nullptr;
      const uint64_t value = PyLong_AsUnsignedLongLong(item);
      if (value == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return nullptr;
      }
      columns[k]->push_back(value);
    }
    request.num_bytes += request.sizes.back();
  }
  const GilReleased released;
  return engine.submit(peer, std::move(request), deadline_s);
}

// Calls `wait(until)` in slices, looking for signals between them, until it returns true or the
// time is up.
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

PeerRef open(Engine& engine, const std::string& name, const std::string& address, uint64_t instance,
             double deadline_s) {
  PeerRef peer;
  try {
    wait_in_slices(std::nullopt, [&](const Deadline& until) {
      if (!peer) peer = engine.open({name, address, instance}, deadline_s);
      return peer->wait_connected(until);
    });
  } catch (...) {
    const GilReleased released;
    if (peer) engine.close_peer(peer);
    throw;
  }
  return peer;
}

bool wait_ticket(Ticket& ticket, std::optional<double> timeout_s) {
  const bool finished =
      wait_in_slices(timeout_s, [&](const Deadline& until) { return ticket.wait(until); });
  if (finished) ticket.check();
  return finished;
}

py::list take_notifications(Engine& engine, double timeout_s) {
  std::vector<Notification> taken;
  wait_in_slices(timeout_s, [&](const Deadline& until) {
    taken = engine.take_notifications(until);
    return !taken.empty();
  });
  py::list list;
  for (const Notification& item : taken)
    list.append(py::make_tuple(item.peer, py::bytes(item.bytes)));
  return list;
}

const char* transport_name(Transport transport) {
  switch (transport) {
    case Transport::kLocal:
      return "local";
    case Transport::kShm:
      return "shm";
    case Transport::kFile:
      return "file";
    case Transport::kTcp:
      break;
  }
  return "tcp";
}

py::list stats(const Engine& engine) {
  py::list list;
  for (const auto& [key, counters] : engine.stats()) {
    list.append(py::make_tuple(key.first, transport_name(key.second), counters.num_bytes_read,
                               counters.num_bytes_written, counters.num_requests,
                               counters.num_errors));
  }
  return list;
}

}  // namespace

void bind_transfer(py::module_& m) {
  py::register_exception_translator(translate);
  py::class_<Region, RegionRef>(m, "TransferRegion");
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
      .def("finished", &Ticket::finished, ReleaseGil())
      .def("wait", &wait_ticket, py::arg("timeout_s").none(true))
      .def("cancel", &Ticket::cancel, ReleaseGil())
      .def("push_when_finished", &Ticket::push_when_finished, py::arg("queue"), py::arg("key"));
  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol())
      .def(py::init<uint64_t>(), py::arg("num_bytes"))
      .def_buffer([](const SharedMemory& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.num_bytes()));
      });
  py::class_<Engine, std::shared_ptr<Engine>>(m, "TransferEngine")
      .def(py::init(&make_engine), py::arg("name"), py::arg("listen"), py::arg("local"),
           py::arg("shm"), py::arg("tcp"), py::arg("file"), py::arg("num_lanes"),
           py::arg("secret").none(true), py::arg("tls").none(true), ReleaseGil())
      .def_property_readonly("name", &Engine::name)
      .def_property_readonly("address", &Engine::address)
      .def_property_readonly("instance", &Engine::instance)
      .def("check_process", &Engine::check_process, py::arg("op"))
      .def(
          "add_region",
          [](Engine& engine, uint64_t address, uint64_t num_bytes, bool writable, bool remote_read,
             bool remote_write) {
            const Rights rights = rights_of(writable, remote_read, remote_write);
            return engine.add_region({address, num_bytes}, rights);
          },
          py::arg("address"), py::arg("num_bytes"), py::arg("writable"), py::arg("remote_read"),
          py::arg("remote_write"), ReleaseGil())
      .def("remove_region", &Engine::remove_region, py::arg("region"), ReleaseGil())
      .def("open", &open, py::arg("name"), py::arg("address"), py::arg("instance"),
           py::arg("deadline_s"))
      .def("close_peer", &Engine::close_peer, py::arg("peer"), ReleaseGil())
      .def("submit", &submit, py::arg("peer"), py::arg("reads"), py::arg("local").noconvert(),
           py::arg("remote").noconvert(), py::arg("sizes"), py::arg("notify").none(true),
           py::arg("deadline_s"))
      .def("submit_rows", &submit_rows, py::arg("peer"), py::arg("reads"), py::arg("rows"),
           py::arg("notify").none(true), py::arg("deadline_s"))
      .def("sync", &Engine::sync, py::arg("peer"), py::arg("deadline_s"), ReleaseGil())
      .def("take_notifications", &take_notifications, py::arg("timeout_s"))
      .def("stats", &stats)
      .def("rejections", &Engine::rejections)
      .def("close", &Engine::close, ReleaseGil());
}

}  // namespace mk::host
