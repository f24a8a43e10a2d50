#include "host/store_objects.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <exception>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "common/check.h"
#include "common/stream_copy.h"
#include "host/gil.h"
#include "host/module.h"
#include "store/checksum.h"
#include "store/objects.h"

namespace py = pybind11;

namespace mk::host {
namespace {

using namespace mk::store;
using PoolRef = std::shared_ptr<Pool>;

// Lives until its last view is gone.
class ObjectPin {
 public:
  ObjectPin(PoolRef pool, const Pin& pin) : pool_(std::move(pool)), pin_(pin) {}
  ObjectPin(const ObjectPin&) = delete;
  ~ObjectPin() { pool_->unpin(pin_); }

  const Pin& pin() const { return pin_; }
  int device() const { return pool_->device(); }
  bool is_whole() const {
    return pin_.checksum == 0 ||
           checksum_of({pool_->piece(pin_.data, pin_.num_bytes)}) == pin_.checksum;
  }

 private:
  const PoolRef pool_;
  const Pin pin_;
};

class ObjectPut {
 public:
  ObjectPut(PoolRef pool, const Writing& writing) : pool_(std::move(pool)), writing_(writing) {}
  ObjectPut(const ObjectPut&) = delete;
  ~ObjectPut() {
    if (is_open_) pool_->give_up({writing_});
  }

  const Writing& writing() const { return writing_; }
  int device() const { return pool_->device(); }

  // `stream`: the stream in which the bytes were written, on the GPU that has them.
  // Returns whether the object is there, see Pool::commit_unless_removed.
  bool commit(bool checksum, int retention, uint16_t position, uint64_t stream,
              bool unless_removed) {
    MK_CHECK(is_open_, "commit: put must be open, got one that was committed or aborted");
    if (device() >= 0) wait_for_stream(device(), stream);
    const uint64_t sum =
        checksum ? checksum_of({pool_->piece(writing_.data, writing_.num_bytes)}) : 0;
    const auto kept = static_cast<Retention>(retention);
    bool is_there = true;
    if (unless_removed) {
      is_there = pool_->commit_unless_removed(writing_, sum, kept, position);
    } else {
      pool_->commit(writing_, sum, kept, position);
    }
    is_open_ = false;
    return is_there;
  }

  void abort() {
    if (is_open_) pool_->abort(writing_);
    is_open_ = false;
  }

 private:
  const PoolRef pool_;
  const Writing writing_;
  bool is_open_ = true;
};

using Indices = py::array_t<int64_t, py::array::c_style>;

// Objects that are written together: their bytes are in the pool, and no one sees them yet.
class ObjectPuts {
 public:
  ObjectPuts(PoolRef pool, size_t most) : pool_(std::move(pool)) {
    states.reserve(most);  // no failure in between loses what was begun
    ids.reserve(most);
    puts_.reserve(most);
  }
  ObjectPuts(const ObjectPuts&) = delete;
  ~ObjectPuts() { abort(); }

  // Returns false, and has begun nothing of it, if there is no room.
  bool begin(const Key& key, const Pieces& pieces, const PutOptions& options) {
    Put put{{}, 0, options};
    const PutState state = pool_->begin(key, total_bytes(pieces), &put.writing);
    if (state == PutState::kFull) return false;
    put.is_open = state == PutState::kOpen;
    states.push_back(static_cast<int>(state));
    ids.push_back(put.is_open ? put.writing.id() : 0);
    puts_.push_back(put);
    return true;
  }

  void fill(size_t i, const Pieces& pieces) {
    Put& put = puts_[i];
    if (put.is_open) put.checksum = store::fill(*pool_, put.writing, pieces, put.options.checksum);
  }

  // Commits some of those that were begun; the others stay open.
  void commit(const Indices& indices) {
    const int64_t* const begin = indices.data();
    const int64_t* const end = begin + indices.size();
    const GilReleased released;
    for (const int64_t* i = begin; i != end; ++i) {
      auto& [writing, checksum, options, is_open] = puts_.at(static_cast<size_t>(*i));
      MK_CHECK(is_open, "commit: put must be open, got one that was committed or aborted");
      pool_->commit(writing, checksum, options.retention, options.position);
      is_open = false;
    }
  }

  void abort() {
    std::vector<Writing> left;
    for (Put& put : puts_) {
      if (put.is_open) left.push_back(put.writing);
      put.is_open = false;
    }
    pool_->give_up(left);
  }

  std::vector<uint64_t> sizes() const {
    std::vector<uint64_t> sizes;
    for (const Put& put : puts_) {
      if (put.is_open) sizes.push_back(put.writing.num_bytes);
    }
    return sizes;
  }

  std::vector<int> states{};    // PutState of each
  std::vector<uint64_t> ids{};  // 0: it was not begun

 private:
  struct Put {
    Writing writing;
    uint64_t checksum;
    PutOptions options;
    bool is_open = false;
  };

  const PoolRef pool_;
  std::vector<Put> puts_{};
};

template <class T>
py::array_t<T> column_of(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

uint64_t address_of(const char* data) { return reinterpret_cast<uint64_t>(data); }

py::buffer_info bytes_at(const char* data, uint64_t num_bytes, int device) {
  if (device >= 0) throw py::buffer_error(concat("the bytes are on GPU ", device));
  auto* const bytes = reinterpret_cast<uint8_t*>(const_cast<char*>(data));
  return py::buffer_info(bytes, static_cast<py::ssize_t>(num_bytes));
}

// Python memory, held while this object lives: objects with the buffer protocol, or tuples
// (address, size, GPU or -1, its stream), whose memory the caller holds. Raises what the objects
// raise if they are not packed or, if required, writable.
class Buffers {
 public:
  Buffers(const py::sequence& buffers, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    views_.reserve(buffers.size());
    for (const py::object item : buffers) {
      if (py::isinstance<py::tuple>(item)) {
        const auto [address, num_bytes, device, stream] =
            item.cast<std::tuple<uint64_t, uint64_t, int, uint64_t>>();
        pieces.push_back({reinterpret_cast<char*>(address), num_bytes, device, stream});
        continue;
      }
      views_.emplace_back();
      if (PyObject_GetBuffer(item.ptr(), &views_.back(), flags) != 0) {
        views_.pop_back();
        release();
        throw py::error_already_set();
      }
      const Py_buffer& view = views_.back();
      pieces.push_back({static_cast<char*>(view.buf), static_cast<uint64_t>(view.len), -1, 0});
    }
  }
  Buffers(const Buffers&) = delete;
  ~Buffers() { release(); }

  Pieces pieces;

 private:
  void release() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    views_.clear();
  }

  std::vector<Py_buffer> views_;
};

std::unique_ptr<ObjectPin> pin(const PoolRef& pool, uint64_t hash, uint64_t scope, bool touch) {
  const std::optional<Pin> pin = pool->pin({hash, scope}, touch);
  if (touch) pool->count(pin ? ReadCounts{1, 0, pin->num_bytes} : ReadCounts{0, 1, 0});
  return pin ? std::make_unique<ObjectPin>(pool, *pin) : nullptr;
}

// (PutState, the put or None)
std::pair<int, std::unique_ptr<ObjectPut>> begin(const PoolRef& pool, uint64_t hash, uint64_t scope,
                                                 uint64_t num_bytes) {
  Writing writing;
  const PutState state = pool->begin({hash, scope}, num_bytes, &writing);
  return {static_cast<int>(state),
          state == PutState::kOpen ? std::make_unique<ObjectPut>(pool, writing) : nullptr};
}

using Retentions = py::array_t<uint8_t, py::array::c_style>;
using Positions = py::array_t<uint16_t, py::array::c_style>;

// Begins n objects, and copies them if there is room for all: else nothing is begun, and None.
// `counts`: how many consecutive parts each has.
std::unique_ptr<ObjectPuts> begin_each(const PoolRef& pool, const Keys& keys,
                                       const py::sequence& parts, const std::vector<size_t>& counts,
                                       bool checksum, const Retentions& retentions,
                                       const Positions& positions) {
  const size_t count = num_keys(keys);
  const Buffers held(parts, /*writable=*/false);
  MK_CHECK(counts.size() == count && static_cast<size_t>(retentions.size()) == count &&
               static_cast<size_t>(positions.size()) == count &&
               std::accumulate(counts.begin(), counts.end(), size_t{0}) == held.pieces.size(),
           "objects: counts, retentions and positions must be as many as keys");
  const uint8_t* const retention = retentions.data();
  const uint16_t* const position = positions.data();
  const GilReleased released;
  auto puts = std::make_unique<ObjectPuts>(pool, count);
  std::vector<Pieces> objects;
  auto piece = held.pieces.begin();
  for (size_t i = 0; i < count; ++i) {
    const auto end = piece + static_cast<std::ptrdiff_t>(counts[i]);
    objects.emplace_back(piece, end);
    piece = end;
    const PutOptions options{checksum, static_cast<Retention>(retention[i]), position[i]};
    if (!puts->begin(keys_of(keys)[i], objects[i], options)) return nullptr;
  }
  for (size_t i = 0; i < count; ++i) puts->fill(i, objects[i]);
  return puts;
}

int write(Pool& pool, uint64_t hash, uint64_t scope, const py::sequence& buffers, bool checksum,
          int retention, uint16_t position) {
  const Buffers held(buffers, /*writable=*/false);
  const GilReleased released;
  const PutOptions options{checksum, static_cast<Retention>(retention), position};
  return static_cast<int>(put_from(&pool, {hash, scope}, held.pieces, options));
}

// As ObjectPool.get_into, and with its errors: the object's size, or None.
std::optional<uint64_t> read(Pool& pool, uint64_t hash, uint64_t scope,
                             std::optional<uint64_t> offset, const py::sequence& buffers,
                             bool verify) {
  const Buffers held(buffers, /*writable=*/true);
  uint64_t object_bytes = 0;
  ReadStatus status{};
  {
    const GilReleased released;
    ReadCounts counts;
    status = get_into(&pool, {hash, scope}, offset, held.pieces, verify, &object_bytes, &counts);
    pool.count(counts);
  }
  if (status == ReadStatus::kDone) return object_bytes;
  if (status == ReadStatus::kAbsent) return std::nullopt;
  if (status == ReadStatus::kDamaged) {
    raise("ChecksumError", py::make_tuple(concat("get_into: object (", hash, ", ", scope,
                                                 ") is not what its checksum says")));
    throw py::error_already_set();
  }
  uint64_t wanted = 0;
  for (const auto& piece : held.pieces) wanted += piece.num_bytes;
  MK_CHECK(status != ReadStatus::kTooSmall, "get_into: buffers must have room for ", object_bytes,
           " bytes, got ", wanted);
  throw InvalidArgument(concat("get_into: offset and buffers must be within the object's ",
                               object_bytes, " bytes, got ", wanted, " from ", offset.value_or(0)));
}

// Calls `read(i, &num_bytes, &counts)` for each object: returns these numbers, or a negative
// `ReadStatus`.
template <class Read>
py::array_t<int64_t> read_all(Pool& pool, size_t count, const Read& read) {
  py::array_t<int64_t> sizes(static_cast<py::ssize_t>(count));
  int64_t* const out = sizes.mutable_data();
  const GilReleased released;
  ReadCounts counts;
  for (size_t i = 0; i < count; ++i) {
    uint64_t num_bytes = 0;
    const ReadStatus status = read(i, &num_bytes, &counts);
    out[i] = status == ReadStatus::kDone ? static_cast<int64_t>(num_bytes)
                                         : -static_cast<int64_t>(status);
  }
  pool.count(counts);
  return sizes;
}

// One buffer per key.
py::array_t<int64_t> read_each(Pool& pool, const Keys& keys, const py::sequence& buffers,
                               bool verify) {
  const Buffers held(buffers, /*writable=*/true);
  const auto read = [&](size_t i, uint64_t* num_bytes, ReadCounts* counts) {
    return get_into(&pool, keys_of(keys)[i], std::nullopt, {held.pieces[i]}, verify, num_bytes,
                    counts);
  };
  return read_all(pool, held.pieces.size(), read);
}

using Table = py::array_t<uint64_t, py::array::c_style>;  // [n, w]

// n objects in host memory: a head of each, and up to w places of what follows it.
class Headed {
 public:
  Headed(const Keys& keys, const py::sequence& heads, const Table& addresses, const Table& sizes)
      : heads_(heads, /*writable=*/false),
        width_(sizes.ndim() == 2 ? static_cast<size_t>(sizes.shape(1)) : 0),
        addresses_(addresses.data()),
        sizes_(sizes.data()) {
    const auto count = static_cast<py::ssize_t>(num_keys(keys) * width_);
    MK_CHECK(heads_.pieces.size() == num_keys(keys) && addresses.size() == count &&
                 sizes.size() == count,
             "objects: heads, addresses and sizes must be as many as keys");
  }

  std::string_view head(size_t i) const {
    return {heads_.pieces[i].data, heads_.pieces[i].num_bytes};
  }

  void add_places(size_t i, Pieces* pieces) const {
    for (size_t at = i * width_; at < (i + 1) * width_; ++at) {
      pieces->push_back({reinterpret_cast<char*>(addresses_[at]), sizes_[at]});
    }
  }

 private:
  const Buffers heads_;
  const size_t width_;
  const uint64_t* const addresses_;
  const uint64_t* const sizes_;
};

py::array_t<int64_t> read_headed(Pool& pool, const Keys& keys, const py::sequence& heads,
                                 std::pair<uint64_t, uint64_t> free, const Table& addresses,
                                 const Table& sizes, bool verify) {
  const Headed objects(keys, heads, addresses, sizes);
  Pieces pieces;
  const auto read = [&](size_t i, uint64_t* num_bytes, ReadCounts* counts) {
    pieces.clear();
    objects.add_places(i, &pieces);
    const Head head{objects.head(i), free.first, free.second};
    return get_headed(&pool, keys_of(keys)[i], head, pieces, verify, num_bytes, counts);
  };
  return read_all(pool, num_keys(keys), read);
}

// Returns a `PutState` for each object, up to the first for which there is no room, or that cannot
// be put, which throws if it is the very first. No positions: 0 for all.
std::vector<int> write_headed(Pool& pool, const Keys& keys, const py::sequence& heads,
                              const Table& addresses, const Table& sizes, bool checksum,
                              int retention, const Positions& positions) {
  const Headed objects(keys, heads, addresses, sizes);
  MK_CHECK(positions.size() == 0 || static_cast<size_t>(positions.size()) == num_keys(keys),
           "objects: positions must be as many as keys");
  PutOptions options{checksum, static_cast<Retention>(retention)};
  const uint16_t* const position = positions.size() == 0 ? nullptr : positions.data();
  std::vector<int> results;
  const GilReleased released;
  for (size_t i = 0; i < num_keys(keys); ++i) {
    const std::string_view head = objects.head(i);
    Pieces pieces{{const_cast<char*>(head.data()), head.size()}};
    objects.add_places(i, &pieces);
    if (position != nullptr) options.position = position[i];
    try {
      results.push_back(static_cast<int>(put_from(&pool, keys_of(keys)[i], pieces, options)));
    } catch (...) {
      if (i == 0) throw;
      break;
    }
    if (results.back() == static_cast<int>(PutState::kFull)) break;
  }
  return results;
}

uint64_t checksum(const py::sequence& buffers) {
  const Buffers held(buffers, /*writable=*/false);
  const GilReleased released;
  return checksum_of(held.pieces);
}

// Host memory only: gathers objects that do not go into a pool.
void gather_into(const py::sequence& buffers, const py::object& target) {
  const Buffers from(buffers, /*writable=*/false);
  const Buffers to(py::make_tuple(target), /*writable=*/true);
  MK_CHECK(total_bytes(from.pieces) <= total_bytes(to.pieces),
           "gather: target must have room for all buffers");
  const GilReleased released;
  gather(from.pieces, to.pieces[0], /*page_locked=*/false);
}

void scatter_from(const py::object& source, const py::sequence& buffers) {
  const Buffers from(py::make_tuple(source), /*writable=*/false);
  const Buffers to(buffers, /*writable=*/true);
  const GilReleased released;
  scatter(from.pieces[0], to.pieces, /*page_locked=*/false);
}

py::tuple hash_of(const std::string& name) {
  const Key key = hash_of_name(name.data(), name.size());
  return py::make_tuple(key.hash, key.scope);
}

// The bytes of a str, as UTF-8, or of bytes. Raises TypeError, UnicodeEncodeError.
std::string_view bytes_of(const py::handle& name) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyUnicode_Check(name.ptr())) {
    const char* const text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
    if (!text) throw py::error_already_set();
    return {text, static_cast<size_t>(size)};
  }
  if (PyBytes_AsStringAndSize(name.ptr(), &data, &size) != 0) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

Keys hash_of_each(const py::sequence& names, uint64_t scope) {
  std::vector<Key> keys;
  keys.reserve(names.size());
  for (const py::object name : names) {  // holds a reference: a sequence may create it on access
    const std::string_view bytes = bytes_of(name);
    keys.push_back(hash_of_name(bytes.data(), bytes.size()));
    keys.back().scope ^= scope;
  }
  return array_of(keys);
}

}  // namespace

void bind_objects(py::module_& m, py::class_<Pool, std::shared_ptr<Pool>>& pool) {
  py::class_<ObjectPin>(m, "ObjectPin", py::buffer_protocol())
      .def_property_readonly("num_bytes", [](const ObjectPin& p) { return p.pin().num_bytes; })
      .def_property_readonly("checksum", [](const ObjectPin& p) { return p.pin().checksum; })
      .def_property_readonly("position", [](const ObjectPin& p) { return p.pin().position; })
      .def("is_whole", &ObjectPin::is_whole, ReleaseGil())
      .def_property_readonly("address", [](const ObjectPin& p) { return address_of(p.pin().data); })
      .def_property_readonly("device", &ObjectPin::device)
      .def_buffer(
          [](const ObjectPin& p) { return bytes_at(p.pin().data, p.pin().num_bytes, p.device()); });
  py::class_<ObjectPut>(m, "ObjectPut", py::buffer_protocol())
      .def_property_readonly("id", [](const ObjectPut& p) { return p.writing().id(); })
      .def_property_readonly("num_bytes", [](const ObjectPut& p) { return p.writing().num_bytes; })
      .def_property_readonly("address",
                             [](const ObjectPut& p) { return address_of(p.writing().data); })
      .def_property_readonly("device", &ObjectPut::device)
      .def("commit", &ObjectPut::commit, py::arg("checksum"), py::arg("retention"),
           py::arg("position"), py::arg("stream"), py::arg("unless_removed"), ReleaseGil())
      .def("abort", &ObjectPut::abort, ReleaseGil())
      .def_buffer([](const ObjectPut& p) {
        return bytes_at(p.writing().data, p.writing().num_bytes, p.device());
      });
  py::class_<ObjectPuts>(m, "ObjectPuts")
      .def_readonly("states", &ObjectPuts::states)
      .def_property_readonly("ids", [](const ObjectPuts& p) { return column_of(p.ids); })
      .def_property_readonly("sizes", &ObjectPuts::sizes)
      .def("commit", &ObjectPuts::commit, py::arg("indices"))
      .def("abort", &ObjectPuts::abort, ReleaseGil())
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](ObjectPuts& p, const py::args&) { p.abort(); }, ReleaseGil());
  pool.def("pin", &pin, py::arg("hash"), py::arg("scope"), py::arg("touch"))
      .def("begin", &begin, py::arg("hash"), py::arg("scope"), py::arg("num_bytes"), ReleaseGil())
      .def("begin_each", &begin_each, py::arg("keys"), py::arg("parts"), py::arg("counts"),
           py::arg("checksum"), py::arg("retentions"), py::arg("positions"))
      .def("write", &write, py::arg("hash"), py::arg("scope"), py::arg("buffers"),
           py::arg("checksum"), py::arg("retention"), py::arg("position"))
      .def("read", &read, py::arg("hash"), py::arg("scope"), py::arg("offset").none(true),
           py::arg("buffers"), py::arg("verify"))
      .def("read_each", &read_each, py::arg("keys"), py::arg("buffers"), py::arg("verify"))
      .def("read_headed", &read_headed, py::arg("keys"), py::arg("heads"), py::arg("free"),
           py::arg("addresses"), py::arg("sizes"), py::arg("verify"))
      .def("write_headed", &write_headed, py::arg("keys"), py::arg("heads"), py::arg("addresses"),
           py::arg("sizes"), py::arg("checksum"), py::arg("retention"), py::arg("positions"));
  m.def("checksum", &checksum, "XXH3-64 of what buffers hold, as objects keep it.",
        py::arg("buffers"));
  m.def("gather", &gather_into, "Copies buffers, one behind the other, into host memory.",
        py::arg("buffers"), py::arg("target"));
  m.def("scatter", &scatter_from, "Copies host memory into buffers, one behind the other.",
        py::arg("source"), py::arg("buffers"));
  m.def("hash_name", &hash_of, "XXH3-128 of bytes, in two words.", py::arg("name"));
  m.def("hash_names", &hash_of_each,
        "The same of many, each a str or bytes, the second word under a scope.", py::arg("names"),
        py::arg("scope"));
}

}  // namespace mk::host
