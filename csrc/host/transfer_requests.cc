// Binds the calls that move memory. Descriptors are passed as arrays or block ids, without a Python
// object per block, or as a few tuples; the GIL is released before they are examined.
#include "host/transfer_requests.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
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
#include "transfer/gpu/gpu_fence.h"
#include "transfer/request/block_pool.h"

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

// Whether it is one-dimensional and packed, of a type that can be read directly.
bool is_plain(const py::array& array) {
  constexpr char kForeign = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? '>' : '<';
  if (array.dtype().byteorder() == kForeign) return false;
  const char kind = array.dtype().kind();
  const py::ssize_t item_bytes = array.itemsize();
  constexpr int kPacked =
      py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  return array.ndim() == 1 && (array.flags() & kPacked) == kPacked &&
         ((kind == 'i' && item_bytes == 4) || ((kind == 'i' || kind == 'u') && item_bytes == 8));
}

// Python has already converted it.
Integers integers_of(const py::array& array) {
  MK_CHECK(is_plain(array), "submit: an array must be packed, of int32, int64 or uint64");
  const char kind = array.dtype().kind();
  const py::ssize_t item_bytes = array.itemsize();
  const auto type = kind == 'u'       ? Integers::Type::kUint64
                    : item_bytes == 8 ? Integers::Type::kInt64
                                      : Integers::Type::kInt32;
  return {array.data(), type, static_cast<size_t>(array.size())};
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
    if (!is_short || !peer.runs_here()) released_.emplace();
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
};

const Op& op_of(std::string_view name) {
  static constexpr Op kOps[] = {{"write", Direction::kWrite},
                                {"read", Direction::kRead},
                                {"write_blocks", Direction::kWrite},
                                {"read_blocks", Direction::kRead}};
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

TicketRef submit(Engine& engine, Peer& peer, std::string_view name, const py::array& local,
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
    request.sizes = non_negative(op.name, "sizes", *each);
    request.num_bytes = std::accumulate(request.sizes.begin(), request.sizes.end(), uint64_t{0});
  } else {
    request.sizes = {std::get<uint64_t>(sizes)};
    request.num_bytes = request.sizes[0] * request.num_ranges();
  }
  request.notify = std::move(notify);
  request.after = fence_of(after);
  request.verify = verify;
  return engine.submit(peer, std::move(request), deadline_s);
}

TicketRef submit_paged(Engine& engine, Peer& peer, std::string_view name, PoolFields local,
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
  return engine.submit(peer, std::move(request), deadline_s);
}

// The common case: arrays and one size. Returns null for anything else, which then takes the
// general path, including its errors.
TicketRef submit_plain(Engine& engine, Peer& peer, std::string_view name, const py::array& local,
                       const py::array& remote, uint64_t size, std::optional<std::string> notify,
                       double deadline_s, const After& after, bool verify) {
  if (!is_plain(local) || !is_plain(remote) || local.size() != remote.size()) return nullptr;
  return submit(engine, peer, name, local, remote, size, std::move(notify), deadline_s, after,
                verify);
}

// Rows as most callers write them: a list of tuples of three plain integers from 0 to 2**64 - 1.
// Returns null for anything else, which then takes the general path, including its errors.
TicketRef submit_rows(Engine& engine, Peer& peer, std::string_view name, const py::list& rows,
                      std::optional<std::string> notify, double deadline_s, const After& after,
                      bool verify) {
  Request request = request_of(op_of(name));
  request.notify = std::move(notify);
  request.verify = verify;
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
  const GilOfRequest gil(peer, request.num_ranges(), request.num_bytes);
  request.after = fence_of(after);
  return engine.submit(peer, std::move(request), deadline_s);
}

}  // namespace

void bind_requests(EngineClass& engine) {
  engine
      .def("submit", &submit, py::arg("peer"), py::arg("op"), py::arg("local"), py::arg("remote"),
           py::arg("sizes"), py::arg("notify").none(true), py::arg("deadline_s"),
           py::arg("after").none(true), py::arg("verify"))
      .def("submit_plain", &submit_plain, py::arg("peer"), py::arg("op"),
           py::arg("local").noconvert(), py::arg("remote").noconvert(), py::arg("size"),
           py::arg("notify").none(true), py::arg("deadline_s"), py::arg("after").none(true),
           py::arg("verify"))
      .def("submit_paged", &submit_paged, py::arg("peer"), py::arg("op"), py::arg("local"),
           py::arg("local_ids"), py::arg("remote"), py::arg("remote_ids"),
           py::arg("notify").none(true), py::arg("deadline_s"), py::arg("after").none(true),
           py::arg("verify"))
      .def("submit_rows", &submit_rows, py::arg("peer"), py::arg("op"), py::arg("rows"),
           py::arg("notify").none(true), py::arg("deadline_s"), py::arg("after").none(true),
           py::arg("verify"));
}

}  // namespace mk::host
