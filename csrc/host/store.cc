// Binds the object pools. The GIL is released while bytes are copied or a mutex is awaited.
#include "store/pool.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/check.h"
#include "host/gil.h"
#include "host/module.h"
#include "host/store_objects.h"
#include "store/watch.h"

namespace py = pybind11;

namespace mk::host {
namespace {

using namespace mk::store;
using Ids = py::array_t<uint64_t, py::array::c_style>;

constexpr size_t kFewKeys =
    512;  // about 50 us: for less, releasing the GIL costs more than it gains

std::shared_ptr<Pool> create(const std::string& path, uint64_t capacity_bytes, uint64_t alignment,
                             uint64_t num_objects, uint64_t num_processes, uint64_t num_pins,
                             int device, std::optional<uint32_t> group) {
  Geometry geometry = Geometry::of(capacity_bytes, alignment, num_objects, num_processes, num_pins);
  geometry.device = device;
  return Pool::create(path, geometry, group);
}

std::shared_ptr<Pool> open(const std::string& path, std::optional<uint32_t> owner,
                           std::optional<uint32_t> group) {
  return Pool::open(path, {owner, group});
}

// Runs the body, with the GIL released if there are many keys.
template <class Body>
void over(const Keys& keys, const Body& body) {
  std::optional<GilReleased> released;
  if (num_keys(keys) > kFewKeys) released.emplace();
  body(keys_of(keys), num_keys(keys));
}

py::array_t<bool> contains_each(const Pool& pool, const Keys& keys, bool or_written) {
  py::array_t<bool> result(static_cast<py::ssize_t>(num_keys(keys)));
  bool* const out = result.mutable_data();
  over(keys,
       [&](const Key* all, size_t count) { pool.contains_each(all, count, or_written, out); });
  return result;
}

py::array_t<uint64_t> ids_of(const Pool& pool, const Keys& keys) {
  py::array_t<uint64_t> result(static_cast<py::ssize_t>(num_keys(keys)));
  uint64_t* const out = result.mutable_data();
  over(keys, [&](const Key* all, size_t count) { pool.ids_of(all, count, out); });
  return result;
}

size_t match_prefix(const Pool& pool, const Keys& keys) {
  size_t matched = 0;
  over(keys, [&](const Key* all, size_t count) { matched = pool.match_prefix(all, count); });
  return matched;
}

py::array_t<bool> remove_each(Pool& pool, const Keys& keys) {
  py::array_t<bool> was_present(static_cast<py::ssize_t>(num_keys(keys)));
  bool* const out = was_present.mutable_data();
  const GilReleased released;
  pool.remove_each(keys_of(keys), num_keys(keys), out);
  return was_present;
}

template <class T, class Field>
py::array_t<T> column(const std::vector<ObjectInfo>& objects, Field field) {
  py::array_t<T> result(static_cast<py::ssize_t>(objects.size()));
  T* out = result.mutable_data();
  for (const ObjectInfo& object : objects) *out++ = static_cast<T>(field(object));
  return result;
}

// keys, num_bytes, recency, retention, uses, position, ids
py::tuple as_tuple(const std::vector<ObjectInfo>& objects) {
  std::vector<Key> keys;
  for (const ObjectInfo& object : objects) keys.push_back(object.key);
  return py::make_tuple(array_of(keys),
                        column<uint64_t>(objects, [](auto& object) { return object.num_bytes; }),
                        column<uint64_t>(objects, [](auto& object) { return object.recency; }),
                        column<uint8_t>(objects, [](auto& object) { return object.retention; }),
                        column<uint16_t>(objects, [](auto& object) { return object.uses; }),
                        column<uint16_t>(objects, [](auto& object) { return object.position; }),
                        column<uint64_t>(objects, [](auto& object) { return object.id; }));
}

py::tuple scan(Pool& pool) {
  std::vector<ObjectInfo> objects;
  {
    const GilReleased released;
    objects = pool.scan();
  }
  return as_tuple(objects);
}

py::tuple victims(Pool& pool, uint64_t num_bytes, bool sieve) {
  std::vector<ObjectInfo> objects;
  {
    const GilReleased released;
    objects = pool.victims(num_bytes, sieve ? Policy::kSieve : Policy::kLru);
  }
  return as_tuple(objects);
}

// Keys, None if there were too many; the number of the next removal.
py::tuple removals_from(Pool& pool, uint64_t begin) {
  std::vector<Key> keys;
  uint64_t end;
  const bool are_known = pool.removals().read(begin, &keys, &end);
  return py::make_tuple(are_known ? py::object(array_of(keys)) : py::none(), end);
}

void order_uses(Pool& pool, const Keys& keys) {
  const GilReleased released;
  pool.order_uses(keys_of(keys), num_keys(keys));
}

py::tuple as_tuple(const Evicted& evicted) {
  return py::make_tuple(array_of(evicted.keys), evicted.num_bytes);
}

bool set_quota(Pool& pool, uint64_t scope, uint64_t num_bytes, uint64_t num_objects) {
  return pool.set_quota({scope, num_bytes, num_objects});
}

// Scope, bytes and objects of each.
std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> quotas(Pool& pool) {
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> all;
  for (const auto& [scope, num_bytes, num_objects] : pool.quotas()) {
    all.emplace_back(scope, num_bytes, num_objects);
  }
  return all;
}

py::tuple evict(Pool& pool, uint64_t num_bytes, bool sieve) {
  Evicted evicted;
  {
    const GilReleased released;
    evicted = pool.evict(num_bytes, sieve ? Policy::kSieve : Policy::kLru);
  }
  return as_tuple(evicted);
}

py::tuple evict_keys(Pool& pool, const Keys& keys, const std::optional<Ids>& ids) {
  Evicted evicted;
  {
    const GilReleased released;
    evicted = pool.evict_keys(keys_of(keys), num_keys(keys), ids ? ids->data() : nullptr);
  }
  return as_tuple(evicted);
}

py::dict stats(Pool& pool, double timeout_s) {
  PoolStats s;
  {
    const GilReleased released;
    s = pool.stats(std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)));
  }
  using namespace py::literals;
  return py::dict(
      "capacity_bytes"_a = s.capacity_bytes, "free_bytes"_a = s.free_bytes,
      "largest_free_bytes"_a = s.largest_free_bytes, "num_free_spans"_a = s.num_free_spans,
      "max_objects"_a = s.max_objects, "num_ready"_a = s.num_ready, "num_writing"_a = s.num_writing,
      "num_doomed"_a = s.num_doomed, "doomed_bytes"_a = s.doomed_bytes, "num_pins"_a = s.num_pins,
      "num_processes"_a = s.num_processes, "num_repairs"_a = s.num_repairs);
}

py::dict counts(const Pool& pool) {
  const PoolCounts c = pool.counts();
  using namespace py::literals;
  return py::dict("num_hits"_a = c.num_hits, "num_misses"_a = c.num_misses,
                  "num_stored"_a = c.num_stored, "num_removed"_a = c.num_removed,
                  "num_evicted"_a = c.num_evicted, "read_bytes"_a = c.read_bytes,
                  "stored_bytes"_a = c.stored_bytes);
}

// Keys that were removed, and then keys that were stored.
py::tuple look(Watch& watch) {
  Watch::Found found;
  {
    const GilReleased released;
    found = watch.look();
  }
  return py::make_tuple(array_of(found.removed), array_of(found.stored));
}

}  // namespace

void bind_store(py::module_& m) {
  py::class_<Pool, std::shared_ptr<Pool>> pool(m, "ObjectPool", py::buffer_protocol());
  pool.def_static("create", &create, py::arg("path"), py::arg("capacity_bytes"),
                  py::arg("alignment"), py::arg("num_objects"), py::arg("num_processes"),
                  py::arg("num_pins"), py::arg("device"), py::arg("group").none(true), ReleaseGil())
      .def_static("open", &open, py::arg("path"), py::arg("owner").none(true),
                  py::arg("group").none(true), ReleaseGil())
      .def("reopen", [](const Pool& p) { return p.reopen().release(); })
      .def_property_readonly("path", &Pool::path)
      .def_property_readonly("alignment", [](const Pool& p) { return p.geometry().alignment; })
      .def_property_readonly("capacity_bytes",
                             [](const Pool& p) { return p.geometry().capacity_bytes; })
      .def_property_readonly("num_pins", [](const Pool& p) { return p.geometry().num_slots; })
      .def_property_readonly("device", &Pool::device)
      .def_property_readonly("address",
                             [](const Pool& p) { return reinterpret_cast<uint64_t>(p.data()); })
      .def_buffer([](const Pool& p) {
        if (p.device() >= 0) throw py::buffer_error(concat("the bytes are on GPU ", p.device()));
        return py::buffer_info(reinterpret_cast<uint8_t*>(p.data()),
                               static_cast<py::ssize_t>(p.geometry().capacity_bytes));
      })
      .def(
          "contains",
          [](const Pool& p, uint64_t hash, uint64_t scope) { return p.contains({hash, scope}); },
          py::arg("hash"), py::arg("scope"))
      .def("contains_each", &contains_each, py::arg("keys"), py::arg("or_written"))
      .def("match_prefix", &match_prefix, py::arg("keys"))
      .def("ids_of", &ids_of, py::arg("keys"))
      .def("keep_removals", &Pool::keep_removals, ReleaseGil())
      .def("note_all_removed", &Pool::note_all_removed, ReleaseGil())
      .def_property_readonly("first_removal", [](Pool& p) { return p.removals().first(); })
      .def_property_readonly("removals_end", [](Pool& p) { return p.removals().end(); })
      .def("removals_from", &removals_from, py::arg("begin"))
      .def(
          "forget_removals", [](Pool& p, uint64_t end) { p.removals().forget(end); },
          py::arg("end"))
      .def("remove_exactly", &Pool::remove_exactly, py::arg("id"), ReleaseGil())
      .def(
          "remove",
          [](Pool& p, uint64_t hash, uint64_t scope, bool is_noted) {
            return p.remove({hash, scope}, is_noted);
          },
          py::arg("hash"), py::arg("scope"), py::arg("is_noted"), ReleaseGil())
      .def("remove_each", &remove_each, py::arg("keys"))
      .def(
          "retain",
          [](Pool& p, uint64_t hash, uint64_t scope, int retention) {
            return p.retain({hash, scope}, static_cast<Retention>(retention));
          },
          py::arg("hash"), py::arg("scope"), py::arg("retention"), ReleaseGil())
      .def("order_uses", &order_uses, py::arg("keys"))
      .def("evict", &evict, py::arg("num_bytes"), py::arg("sieve"))
      .def("victims", &victims, py::arg("num_bytes"), py::arg("sieve"))
      .def("evict_keys", &evict_keys, py::arg("keys"), py::arg("ids").none(true))
      .def("set_quota", &set_quota, py::arg("scope"), py::arg("num_bytes"), py::arg("num_objects"),
           ReleaseGil())
      .def("quotas", &quotas, ReleaseGil())
      .def("reap", &Pool::reap, ReleaseGil())
      .def("page_lock", &Pool::page_lock, py::arg("device"), ReleaseGil())
      .def("scan", &scan)
      .def("stats", &stats, py::arg("timeout_s"))
      .def("counts", &counts);
  py::class_<Watch>(m, "PoolWatch")
      .def(py::init<std::shared_ptr<Pool>>(), py::arg("pool"))
      .def("look", &look);
  bind_objects(m, pool);
}

}  // namespace mk::host
