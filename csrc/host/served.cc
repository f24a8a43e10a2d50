#include "host/served.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/check.h"
#include "host/gil.h"
#include "host/plain.h"
#include "host/store_objects.h"
#include "served/object_client.h"
#include "served/object_service.h"
#include "served/redis_publisher.h"
#include "transfer/engine/engine.h"
#include "transfer/wire/wire.h"

namespace py = pybind11;

namespace mk::host {
namespace {

using namespace mk::served;
using store::Key;
using store::Pool;
using transfer::Deadline;
using transfer::Engine;
using transfer::Peer;

using Words = py::array_t<uint64_t, py::array::c_style>;

template <class Call>
auto without_gil(const Call& call) {
  const GilReleased released;
  return call();
}

template <class T, class Rows, class Field>
py::array_t<T> column(const Rows& rows, Field field) {
  py::array_t<T> result(static_cast<py::ssize_t>(rows.size()));
  std::transform(rows.begin(), rows.end(), result.mutable_data(), field);
  return result;
}

std::unique_ptr<ObjectsResponse> read(Engine& engine, Peer& peer, const Keys& keys,
                                      const Words& offsets, const Words& sizes, bool sums,
                                      bool compare, double deadline_s) {
  const size_t count = num_keys(keys);
  MK_CHECK(static_cast<size_t>(offsets.size()) == count && offsets.size() == sizes.size(),
           "read_objects: keys, offsets and sizes must be as many");
  std::vector<ReadEntry> entries(count);
  for (size_t i = 0; i < count; ++i) {
    entries[i] = {keys_of(keys)[i], offsets.data()[i], sizes.data()[i]};
  }
  const uint32_t flags = (sums ? kReadSums : 0) | (compare ? kReadCompare : 0);
  const GilReleased released;
  return read_objects(engine, peer, entries, flags, deadline_s);
}

py::array_t<bool> receive(ObjectsResponse& reply, const std::vector<Places>& places, bool verify,
                          double deadline_s) {
  py::array_t<bool> is_right(static_cast<py::ssize_t>(reply.rows().size()));
  bool* const data = is_right.mutable_data();
  const GilReleased released;
  reply.receive(places, verify, Deadline::after(deadline_s), data);
  return is_right;
}

std::vector<Key> list_of(const Keys& keys) {
  return {keys_of(keys), keys_of(keys) + num_keys(keys)};
}

py::array_t<int64_t> read_into(Engine& engine, Peer& peer, const Keys& keys,
                               const std::vector<Places>& places, bool verify, double answer_s,
                               double deadline_s) {
  const std::vector<int64_t> sizes = without_gil([&, keys = list_of(keys)] {
    return read_objects_into(engine, peer, keys, places, verify, answer_s, deadline_s);
  });
  return py::array_t<int64_t>(static_cast<py::ssize_t>(sizes.size()), sizes.data());
}

py::array_t<uint8_t> statuses_of(const std::vector<ObjectStatus>& statuses) {
  return column<uint8_t>(statuses, [](ObjectStatus s) { return static_cast<uint8_t>(s); });
}

py::array_t<uint8_t> write(Engine& engine, Peer& peer, const Keys& keys,
                           const std::vector<Places>& objects, bool publish, bool verify,
                           double deadline_s) {
  return statuses_of(without_gil([&, keys = list_of(keys)] {
    const uint32_t flags = publish ? kWritePublish : 0;
    return write_objects(engine, peer, keys, objects, flags, verify, deadline_s);
  }));
}

py::array_t<uint8_t> remove(Engine& engine, Peer& peer, const Keys& keys, double deadline_s) {
  return statuses_of(without_gil(
      [&, keys = list_of(keys)] { return remove_objects(engine, peer, keys, deadline_s); }));
}

// See host/plain.h.
std::optional<Keys> plain_keys(py::handle object) {
  if (!py::isinstance<Keys>(object)) return {};
  auto keys = py::reinterpret_borrow<Keys>(object);
  if (keys.ndim() != 2 || keys.shape(1) != 2) return {};
  if (num_keys(keys) < 1 || num_keys(keys) > kMaxRequestKeys) return {};
  return keys;
}

std::optional<Places> plain_places(PyObject* pieces) {
  if (!PyList_CheckExact(pieces)) return {};
  Places places;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pieces); ++i) {
    PyObject* const piece = PyList_GET_ITEM(pieces, i);
    if (!PyTuple_CheckExact(piece) || PyTuple_GET_SIZE(piece) != 2) return {};
    const std::optional<uint64_t> address = plain_unsigned(PyTuple_GET_ITEM(piece, 0));
    const std::optional<uint64_t> num_bytes = plain_unsigned(PyTuple_GET_ITEM(piece, 1));
    if (!address || !num_bytes) return {};
    places.emplace_back(*address, *num_bytes);
  }
  return places;
}

std::optional<std::vector<Places>> plain_places_each(py::handle objects, size_t count) {
  if (!PyList_CheckExact(objects.ptr()) ||
      static_cast<size_t>(PyList_GET_SIZE(objects.ptr())) != count) {
    return {};
  }
  std::vector<Places> each;
  for (size_t i = 0; i < count; ++i) {
    auto places = plain_places(PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i)));
    if (!places) return {};
    each.push_back(std::move(*places));
  }
  return each;
}

// As read_into, of plain arguments. None, and nothing was done, for any others.
std::optional<py::array_t<int64_t>> read_plain(Engine& engine, Peer& peer, py::handle keys,
                                               py::handle places, py::handle verify,
                                               py::handle answer_s, py::handle deadline_s) {
  const auto asked = plain_keys(keys);
  const auto where = asked ? plain_places_each(places, num_keys(*asked)) : std::nullopt;
  const auto verifies = plain_bool(verify);
  const auto answer = plain_deadline(answer_s), deadline = plain_deadline(deadline_s);
  if (!where || !verifies || !answer || !deadline) return {};
  return read_into(engine, peer, *asked, *where, *verifies, *answer, *deadline);
}

// Likewise, as write.
std::optional<py::array_t<uint8_t>> write_plain(Engine& engine, Peer& peer, py::handle keys,
                                                py::handle objects, py::handle publish,
                                                py::handle verify, py::handle deadline_s) {
  const auto asked = plain_keys(keys);
  const auto where = asked ? plain_places_each(objects, num_keys(*asked)) : std::nullopt;
  const auto publishes = plain_bool(publish), verifies = plain_bool(verify);
  const auto deadline = plain_deadline(deadline_s);
  if (!where || !publishes || !verifies || !deadline) return {};
  return write(engine, peer, *asked, *where, *publishes, *verifies, *deadline);
}

// None: it is broken.
std::optional<py::array_t<bool>> publish(RedisPublisher& publisher, const Keys& keys) {
  const auto listed = without_gil([&, keys = list_of(keys)] { return publisher.publish(keys); });
  if (!listed) return std::nullopt;
  return column<bool>(*listed, [](bool is_listed) { return is_listed; });
}

// As Served in Python.
py::tuple take_done(ObjectService& service) {
  const ObjectService::Done done = service.take_done();
  return py::make_tuple(array_of(done.read), done.is_listed_in_vain);
}

}  // namespace

void bind_served_objects(py::module_& m, EngineClass& engine) {
  m.attr("WHOLE_OBJECT") = kWhole;
  m.attr("MAX_RPC_KEYS") = kMaxRequestKeys;
  m.attr("MAX_RPC_BYTES") = transfer::kMaxRpcPayloadBytes;
  py::class_<RedisPublisher, std::shared_ptr<RedisPublisher>>(m, "RedisPublisher")
      .def(py::init([](int fd, const py::bytes& head, double timeout_s, int64_t clock_ms) {
             return std::make_shared<RedisPublisher>(Fd(fd), head, timeout_s, clock_ms);
           }),
           py::arg("fd"), py::arg("head"), py::arg("timeout_s"), py::arg("clock_ms"))
      .def("publish", &publish, py::arg("keys"))
      .def_property_readonly("reason", py::cpp_function(&RedisPublisher::reason, ReleaseGil()))
      .def_property_readonly("is_late", py::cpp_function(&RedisPublisher::is_late, ReleaseGil()));
  py::class_<ObjectService, std::shared_ptr<ObjectService>>(m, "ObjectService")
      .def(py::init([](std::shared_ptr<Pool> pool, bool is_all, bool may_write, bool checksums) {
             return std::make_shared<ObjectService>(
                 std::move(pool), ObjectService::Options{is_all, may_write, checksums});
           }),
           py::arg("pool"), py::arg("is_all"), py::arg("may_write"), py::arg("checksums"))
      .def("let_put", &ObjectService::let_put, py::arg("takes_puts"))
      .def("let_publish", &ObjectService::let_publish, py::arg("publisher").none(true))
      .def("take_done", &take_done);
  py::class_<ObjectsResponse>(m, "ObjectsResponse")
      .def_property_readonly("statuses",
                             [](const ObjectsResponse& reply) {
                               return column<uint8_t>(reply.rows(), [](const ReadRow& row) {
                                 return static_cast<uint8_t>(row.status);
                               });
                             })
      .def_property_readonly("object_bytes",
                             [](const ObjectsResponse& reply) {
                               return column<uint64_t>(reply.rows(), [](const ReadRow& row) {
                                 return row.object_bytes;
                               });
                             })
      .def("receive", &receive, py::arg("places"), py::arg("verify"), py::arg("deadline_s"))
      .def("close", &ObjectsResponse::close, ReleaseGil());
  engine
      .def(
          "serve_objects",
          [](Engine& self, std::shared_ptr<ObjectService> service) {
            if (service) self.check_process("serve");
            self.serve(std::move(service));
          },
          py::arg("service").none(true))
      .def(
          "stop_serving",
          [](Engine& self, const ObjectService& service) { self.stop_serving(service); },
          py::arg("service"))
      .def("read_objects", &read, py::arg("peer"), py::arg("keys"), py::arg("offsets"),
           py::arg("sizes"), py::arg("sums"), py::arg("compare"), py::arg("deadline_s"))
      .def("read_objects_into", &read_into, py::arg("peer"), py::arg("keys"), py::arg("places"),
           py::arg("verify"), py::arg("answer_s"), py::arg("deadline_s"))
      .def("write_objects", &write, py::arg("peer"), py::arg("keys"), py::arg("objects"),
           py::arg("publish"), py::arg("verify"), py::arg("deadline_s"))
      .def("read_plain", &read_plain, py::arg("peer"), py::arg("keys"), py::arg("places"),
           py::arg("verify"), py::arg("answer_s"), py::arg("deadline_s"))
      .def("write_plain", &write_plain, py::arg("peer"), py::arg("keys"), py::arg("objects"),
           py::arg("publish"), py::arg("verify"), py::arg("deadline_s"))
      .def("remove_objects", &remove, py::arg("peer"), py::arg("keys"), py::arg("deadline_s"));
}

}  // namespace mk::host
