// Binds the calls that move memory. Descriptors are passed as arrays or block ids, without a Python
// object per block, or as a few tuples; the GIL is released before they are examined.
#include "host/transfer_requests.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "common/check.h"
#include "host/gil.h"
#include "host/plain.h"
#include "transfer/engine/stream_transfers.h"
#include "transfer/gpu/gpu_fence.h"
#include "transfer/request/block_pool.h"
#include "transfer/request/integers.h"

namespace py = pybind11;

namespace mk::host {
namespace {

using namespace mk::transfer;

// As passed from Python: (planes, num_blocks, block_bytes, stride_bytes).
using PoolFields = std::tuple<std::vector<uint64_t>, uint64_t, uint64_t, uint64_t>;

// What a request must follow: (whether it is a stream, the driver's handle, its GPU or -1).
using After = std::optional<std::tuple<bool, uint64_t, int>>;

std::shared_ptr<GpuFence> fence_of(const After& after) {
  if (!after) return nullptr;
  const auto& [is_stream, handle, device] = *after;
  return is_stream ? GpuFence::behind_stream(handle, device)
                   : GpuFence::behind_event(handle, device);
}

// The contents of a one-dimensional, packed array of a type that can be read directly; nothing for
// any other.
std::optional<Integers> plain_integers(const py::array& array) {
  constexpr char kForeign = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? '>' : '<';
  constexpr int kPacked =
      py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  if (array.ndim() != 1 || (array.flags() & kPacked) != kPacked) return {};
  const py::dtype type = array.dtype();
  if (type.byteorder() == kForeign) return {};
  const char kind = type.kind();
  const py::ssize_t item_bytes = type.itemsize();
  const auto count = static_cast<size_t>(array.shape(0));
  if (kind == 'i' && item_bytes == 4) return Integers{array.data(), Integers::Type::kInt32, count};
  if (item_bytes != 8) return {};
  if (kind == 'i') return Integers{array.data(), Integers::Type::kInt64, count};
  if (kind == 'u') return Integers{array.data(), Integers::Type::kUint64, count};
  return {};
}

// Python has already converted it.
Integers integers_of(const py::array& array) {
  const std::optional<Integers> integers = plain_integers(array);
  MK_CHECK(integers, "submit: an array must be packed, of int32, int64 or uint64");
  return *integers;
}

BlockPool pool_of(PoolFields fields) {
  auto& [planes, num_blocks, block_bytes, stride_bytes] = fields;
  return {std::move(planes), num_blocks, block_bytes, stride_bytes};
}

// The GIL while a request is submitted: released, except for a short one that is carried out at
// once. Reacquiring it while other threads want it would take several times as long as that.
class GilOfRequest {
 public:
  GilOfRequest(const Peer& peer, size_t num_ranges, uint64_t num_bytes) {
    const bool is_short = num_ranges <= kMaxShortRanges && num_bytes <= kMaxShortBytes;
    if (!is_short || !peer.runs_in_caller()) released_.emplace();
  }

 private:
  static constexpr size_t kMaxShortRanges = 16;
  static constexpr uint64_t kMaxShortBytes = 64ull << 10;

  std::optional<GilReleased> released_;
};

// A function that callers know.
struct Op {
  const char* name;
  Direction direction;
  bool takes_rows;  // (local, remote, size) each; else columns, or blocks of pools
};

const Op& op_of(std::string_view name) {
  static constexpr Op kOps[] = {{"write", Direction::kWrite, true},
                                {"read", Direction::kRead, true},
                                {"write_blocks", Direction::kWrite, false},
                                {"read_blocks", Direction::kRead, false}};
  const auto* const found =
      std::find_if(std::begin(kOps), std::end(kOps), [&](const Op& op) { return op.name == name; });
  MK_CHECK(found != std::end(kOps), "submit: op must be a call of an engine, got ", name);
  return *found;
}

Request request_of(const Op& op) {
  Request request{};
  request.op = op.name;
  request.direction = op.direction;
  return request;
}

void set_sizes(Request& request, const Integers& sizes) {
  request.sizes = non_negative(request.op, "sizes", sizes);
  request.num_bytes = std::accumulate(request.sizes.begin(), request.sizes.end(), uint64_t{0});
}

// What Python gets: a ticket; or a number of bytes, which have been delivered.
using Submitted = std::variant<TicketRef, uint64_t>;

Submitted submit_to(Engine& engine, Peer& peer, Request request, double deadline_s) {
  const uint64_t num_bytes = request.num_bytes;
  TicketRef ticket = engine.submit(peer, std::move(request), deadline_s);
  if (ticket) return ticket;
  return num_bytes;
}

Submitted submit(Engine& engine, Peer& peer, std::string_view name, const py::array& local,
                 const py::array& remote, const std::variant<py::array, uint64_t>& sizes,
                 std::optional<std::string> notify, double deadline_s, const After& after,
                 bool verify) {
  const Op& op = op_of(name);
  const Integers from = integers_of(local), to = integers_of(remote);
  std::optional<Integers> each;
  if (const auto* const array = std::get_if<py::array>(&sizes)) each = integers_of(*array);
  MK_CHECK(from.count == to.count && (!each || each->count == from.count),
           "submit: the arrays must be of one length");
  const uint64_t* const size = std::get_if<uint64_t>(&sizes);
  const GilOfRequest gil(peer, from.count, size ? from.count * *size : UINT64_MAX);
  Request request = request_of(op);
  request.local = non_negative(op.name, "local_addresses", from);
  request.remote = non_negative(op.name, "remote_addresses", to);
  if (each) {
    set_sizes(request, *each);
  } else {
    request.sizes = {std::get<uint64_t>(sizes)};
    request.num_bytes = request.sizes[0] * request.num_ranges();
  }
  request.notify = std::move(notify);
  request.after = fence_of(after);
  request.verify = verify;
  return submit_to(engine, peer, std::move(request), deadline_s);
}

Submitted submit_paged(Engine& engine, Peer& peer, std::string_view name, PoolFields local,
                       const py::array& local_ids, PoolFields remote, const py::array& remote_ids,
                       std::optional<std::string> notify, double deadline_s, const After& after,
                       bool verify) {
  const Integers from = integers_of(local_ids), to = integers_of(remote_ids);
  const GilReleased released;
  const Op& op = op_of(name);
  Request request =
      paged_request(op.direction, pool_of(std::move(local)), from, pool_of(std::move(remote)), to);
  request.op = op.name;
  request.notify = std::move(notify);
  request.after = fence_of(after);
  request.verify = verify;
  return submit_to(engine, peer, std::move(request), deadline_s);
}

void enqueue(StreamTransfers& transfers, uint64_t stream, PeerRef peer, std::string_view name,
             const py::array& local, const py::array& remote, const py::array& sizes,
             double deadline_s, uint64_t key) {
  const Integers from = integers_of(local), to = integers_of(remote), each = integers_of(sizes);
  MK_CHECK(from.count == to.count && from.count == each.count,
           "enqueue: the arrays must be of one length");
  const GilReleased released;
  const Op& op = op_of(name);
  Request request = request_of(op);
  request.local = non_negative(op.name, "local_addresses", from);
  request.remote = non_negative(op.name, "remote_addresses", to);
  set_sizes(request, each);
  transfers.enqueue(stream, std::move(peer), std::move(request), deadline_s, key);
}

// The requests to one peer as most callers write them, see host/plain.h.
class PlainRequests {
 public:
  PlainRequests(std::shared_ptr<Engine> engine, PeerRef peer)
      : engine_(std::move(engine)), peer_(std::move(peer)) {}

  // As Python calls it: (op, where, notify, deadline_s, verify). `where` is a list of tuples of
  // three integers from 0 to 2**64 - 1, or as the op is: (array, array, integer), or blocks of
  // pools: (fields, array, fields, array). Returns None, and has done nothing, for anything else,
  // or anything wrong: it then takes the general path, including its errors.
  static PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept try {
    if (count != 5) Py_RETURN_NONE;
    const auto& requests = *static_cast<PlainRequests*>(PyCapsule_GetPointer(self, nullptr));
    const std::optional<Submitted> submitted = requests.submit(arguments);
    return submitted ? py::cast(*submitted).release().ptr() : py::none().release().ptr();
  } catch (const std::exception&) {
    Py_RETURN_NONE;
  }

 private:
  std::optional<Submitted> submit(PyObject* const* arguments) const {
    PyObject* const descriptors = arguments[1];
    PyObject* const notify = arguments[2];
    const std::optional<double> deadline_s = plain_deadline(arguments[3]);
    const std::optional<bool> verify = plain_bool(arguments[4]);
    if (!deadline_s || !verify) return {};
    const Op& op = op_of(py::handle(arguments[0]).cast<std::string_view>());
    Request request = request_of(op);
    request.verify = *verify;
    if (PyBytes_CheckExact(notify)) {
      request.notify.emplace(PyBytes_AS_STRING(notify), PyBytes_GET_SIZE(notify));
    } else if (notify != Py_None) {
      return {};
    }
    if (op.takes_rows) return submit_rows(descriptors, request, *deadline_s);
    if (!PyTuple_CheckExact(descriptors)) return {};
    return PyTuple_GET_SIZE(descriptors) == 4 ? submit_blocks(descriptors, request, *deadline_s)
                                              : submit_columns(descriptors, request, *deadline_s);
  }

  std::optional<Submitted> submit_rows(PyObject* rows, Request& request, double deadline_s) const {
    if (!PyList_CheckExact(rows)) return {};
    std::vector<uint64_t>* const columns[] = {&request.local, &request.remote, &request.sizes};
    const Py_ssize_t count = PyList_GET_SIZE(rows);
    for (auto* column : columns) column->reserve(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const row = PyList_GET_ITEM(rows, i);
      if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != 3) return {};
      for (int k = 0; k < 3; ++k) {
        const std::optional<uint64_t> value = plain_unsigned(PyTuple_GET_ITEM(row, k));
        if (!value) return {};
        columns[k]->push_back(*value);
      }
      request.num_bytes += request.sizes.back();
    }
    const GilOfRequest gil(*peer_, request.num_ranges(), request.num_bytes);
    return submit_to(*engine_, *peer_, std::move(request), deadline_s);
  }

  std::optional<Submitted> submit_columns(PyObject* columns, Request& request,
                                          double deadline_s) const {
    if (PyTuple_GET_SIZE(columns) != 3) return {};
    const auto local = plain_array(PyTuple_GET_ITEM(columns, 0));
    const auto remote = plain_array(PyTuple_GET_ITEM(columns, 1));
    const std::optional<uint64_t> size = plain_unsigned(PyTuple_GET_ITEM(columns, 2));
    if (!size || !local || !remote) return {};
    const auto from = plain_integers(*local), to = plain_integers(*remote);
    if (!from || !to || from->count != to->count) return {};
    const GilOfRequest gil(*peer_, from->count, from->count * *size);
    request.local = non_negative(request.op, "local_addresses", *from);
    request.remote = non_negative(request.op, "remote_addresses", *to);
    request.sizes = {*size};
    request.num_bytes = *size * request.num_ranges();
    return submit_to(*engine_, *peer_, std::move(request), deadline_s);
  }

  std::optional<Submitted> submit_blocks(PyObject* blocks, Request& request,
                                         double deadline_s) const {
    const auto local_ids = plain_array(PyTuple_GET_ITEM(blocks, 1));
    const auto remote_ids = plain_array(PyTuple_GET_ITEM(blocks, 3));
    if (!local_ids || !remote_ids) return {};
    const auto from = plain_integers(*local_ids), to = plain_integers(*remote_ids);
    if (!from || !to) return {};
    const BlockPool local = pool_of(py::handle(PyTuple_GET_ITEM(blocks, 0)).cast<PoolFields>());
    const BlockPool remote = pool_of(py::handle(PyTuple_GET_ITEM(blocks, 2)).cast<PoolFields>());
    const size_t num_ranges = local.planes.size() * from->count;
    const GilOfRequest gil(*peer_, num_ranges, num_ranges * local.block_bytes);
    Request paged = paged_request(request.direction, local, *from, remote, *to);
    paged.op = request.op;
    paged.notify = std::move(request.notify);
    paged.verify = request.verify;
    return submit_to(*engine_, *peer_, std::move(paged), deadline_s);
  }

  const std::shared_ptr<Engine> engine_;
  const PeerRef peer_;
};

// As Python calls it: (values, indices). Returns values[indices], of uint64; None, and has done
// nothing, unless both are arrays that can be read as they are and all indices are in range.
PyObject* take_addresses(PyObject*, PyObject* const* arguments, Py_ssize_t count) noexcept try {
  if (count != 2) Py_RETURN_NONE;
  const auto values = plain_array(arguments[0]), indices = plain_array(arguments[1]);
  if (!values || !indices) Py_RETURN_NONE;
  const auto from = plain_integers(*values), at = plain_integers(*indices);
  if (!from || from->type != Integers::Type::kUint64 || !at) Py_RETURN_NONE;
  py::array_t<uint64_t> taken(static_cast<py::ssize_t>(at->count));
  const auto* const source = static_cast<const uint64_t*>(from->data);
  if (!take(source, from->count, *at, taken.mutable_data())) Py_RETURN_NONE;
  return taken.release().ptr();
} catch (const std::exception&) {
  PyErr_Clear();
  Py_RETURN_NONE;
}

py::object plain_requests(std::shared_ptr<Engine> engine, PeerRef peer) {
  static PyMethodDef method{
      "submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&PlainRequests::call)),
      METH_FASTCALL, nullptr};
  const py::capsule self(new PlainRequests(std::move(engine), std::move(peer)),
                         [](void* requests) { delete static_cast<PlainRequests*>(requests); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

void bind_requests(py::module_& m, EngineClass& engine) {
  static PyMethodDef functions[] = {
      {"take_addresses",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&take_addresses)), METH_FASTCALL,
       nullptr},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
  py::class_<StreamTransfers, std::shared_ptr<StreamTransfers>>(m, "StreamTransfers")
      .def(py::init<std::shared_ptr<Engine>>(), py::arg("engine"))
      .def("enqueue", &enqueue, py::arg("stream"), py::arg("peer"), py::arg("op"), py::arg("local"),
           py::arg("remote"), py::arg("sizes"), py::arg("deadline_s"), py::arg("key"))
      .def(
          "take",
          [](StreamTransfers& self, double timeout_s) {
            return self.take(Deadline::after(timeout_s));
          },
          py::arg("timeout_s"), ReleaseGil())
      .def("check", &StreamTransfers::check, ReleaseGil());
  engine.def("uses_only_nics", &Engine::uses_only_nics, py::arg("peer"))
      .def("submit", &submit, py::arg("peer"), py::arg("op"), py::arg("local"), py::arg("remote"),
           py::arg("sizes"), py::arg("notify").none(true), py::arg("deadline_s"),
           py::arg("after").none(true), py::arg("verify"))
      .def("submit_paged", &submit_paged, py::arg("peer"), py::arg("op"), py::arg("local"),
           py::arg("local_ids"), py::arg("remote"), py::arg("remote_ids"),
           py::arg("notify").none(true), py::arg("deadline_s"), py::arg("after").none(true),
           py::arg("verify"))
      .def("plain_requests", &plain_requests, py::arg("peer"));
}

}  // namespace mk::host
