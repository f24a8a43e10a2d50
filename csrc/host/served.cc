#include "host/served.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/check.h"
#include "host/gil.h"
#include "host/store_objects.h"
#include "served/object_service.h"
#include "served/object_wire.h"
#include "store/objects.h"
#include "transfer/engine.h"
#include "transfer/error.h"
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
using transfer::Question;
using transfer::Reply;

using Words = py::array_t<uint64_t, py::array::c_style>;
using Places = std::vector<std::pair<uint64_t, uint64_t>>;  // (address, bytes)

template <class T, class Rows, class Field>
py::array_t<T> column(const Rows& rows, Field field) {
  py::array_t<T> result(static_cast<py::ssize_t>(rows.size()));
  std::transform(rows.begin(), rows.end(), result.mutable_data(), field);
  return result;
}

iovec part_at(uint64_t address, uint64_t num_bytes) {
  return {reinterpret_cast<void*>(address), num_bytes};
}

// At most 2**64 - 1, whatever the sum is.
uint64_t total_of(const Places& pieces) {
  uint64_t total = 0;
  for (const auto& [address, size] : pieces) {
    if (__builtin_add_overflow(total, size, &total)) return UINT64_MAX;
  }
  return total;
}

template <class Entry>
std::string text_of(Ask ask, uint32_t flags, const std::vector<Entry>& entries) {
  MK_CHECK(!entries.empty() && entries.size() <= kMaxAskedKeys, "ask: keys must be 1 to ",
           kMaxAskedKeys, ", got ", entries.size());
  const AskHeader header{ask, flags, static_cast<uint32_t>(entries.size()), 0, {}};
  std::string question(sizeof(header) + entries.size() * sizeof(Entry), '\0');
  std::memcpy(question.data(), &header, sizeof(header));
  std::memcpy(question.data() + sizeof(header), entries.data(), entries.size() * sizeof(Entry));
  return question;
}

transfer::TransferError malformed(const std::string& peer) {
  return {peer, "protocol error: a malformed answer"};
}

template <class T>
std::vector<T> receive_rows(Reply& reply, size_t count, const std::string& peer, bool is_all,
                            const Deadline& deadline) {
  const uint64_t due = count * sizeof(T);
  if (is_all ? reply.num_left() != due : reply.num_left() < due) {
    throw malformed(peer);
  }
  std::vector<T> rows(count);
  reply.receive({{rows.data(), due}}, deadline);
  return rows;
}

// Compares objects with their reported checksums, while their bytes arrive in order.
class Comparison {
 public:
  Comparison(const std::vector<ReadAnswer>& rows, bool verify, bool* is_right)
      : rows_(rows), verify_(verify), is_right_(is_right) {
    begin();
  }

  // The next part of an object; without an address it was discarded.
  void add(const iovec& part) {
    is_looked_at_ &= part.iov_base != nullptr;
    if (is_looked_at_) checksum_.add(part.iov_base, part.iov_len);
    left_ -= part.iov_len;
    if (left_ > 0) return;
    end();
    begin();
  }

 private:
  // Advances to the next object that has bytes.
  void begin() {
    for (; at_ < rows_.size(); end()) {
      left_ = rows_[at_].num_bytes;
      is_looked_at_ = verify_ && rows_[at_].status == AskStatus::kDone && rows_[at_].checksum != 0;
      checksum_.begin();
      if (left_ > 0) return;
    }
  }
  void end() {
    is_right_[at_] = !is_looked_at_ || checksum_.value() == rows_[at_].checksum;
    ++at_;
  }

  const std::vector<ReadAnswer>& rows_;
  const bool verify_;
  bool* const is_right_;
  store::Checksum checksum_;
  size_t at_ = 0;
  uint64_t left_ = 0;  // of the current object
  bool is_looked_at_ = false;
};

// Processes this many bytes at a time: they are examined in the cache while the next ones arrive.
template <class Body>
void for_each_step(std::vector<iovec> parts, const Body& body) {
  constexpr uint64_t kStepBytes = 256 << 10;
  std::vector<iovec> step;
  for (size_t i = 0; i < parts.size(); body(step)) {
    step.clear();
    for (uint64_t room = kStepBytes; i < parts.size() && room > 0;) {
      iovec& part = parts[i];
      const uint64_t size = std::min<uint64_t>(part.iov_len, room);
      step.push_back({part.iov_base, size});
      room -= size;
      part.iov_len -= size;
      if (part.iov_base) part.iov_base = static_cast<char*>(part.iov_base) + size;
      if (part.iov_len == 0) ++i;
    }
  }
}

// A peer's answer with the requested objects.
class ObjectsReply {
 public:
  ObjectsReply(std::string peer, std::unique_ptr<Reply> reply,
               const std::vector<ReadEntry>& entries, const Deadline& deadline)
      : peer_(std::move(peer)), reply_(std::move(reply)) {
    rows_ = receive_rows<ReadAnswer>(*reply_, entries.size(), peer_, /*is_all=*/false, deadline);
    uint64_t left = reply_->num_left();
    bool is_sound = true;
    for (size_t i = 0; i < rows_.size(); ++i) {
      is_sound &= rows_[i].num_bytes <= left && answers(entries[i], rows_[i]);
      left -= rows_[i].num_bytes;
    }
    if (!is_sound || left != 0) {
      throw malformed(peer_);
    }
  }

  const std::vector<ReadAnswer>& rows() const { return rows_; }

  // For each object that is sent, where its bytes go; they are discarded if it has no entry.
  // Returns which objects match the checksum that the peer reported, or have none.
  py::array_t<bool> receive(const std::vector<Places>& places, bool verify, double deadline_s) {
    MK_CHECK(reply_, "receive: reply must be open, got one that was received or closed");
    MK_CHECK(places.size() == rows_.size(), "receive: places must be ", rows_.size(), ", got ",
             places.size());
    std::vector<iovec> parts;
    for (size_t i = 0; i < rows_.size(); ++i) add_parts(places[i], rows_[i].num_bytes, parts);
    py::array_t<bool> result(static_cast<py::ssize_t>(rows_.size()));
    bool* const is_right = result.mutable_data();
    const std::unique_ptr<Reply> reply = std::move(reply_);  // before another thread can use it
    const GilReleased released;
    const Deadline deadline = Deadline::after(deadline_s);
    Comparison comparison(rows_, verify, is_right);
    for_each_step(parts, [&](const std::vector<iovec>& step) {
      reply->receive(step, deadline);
      for (const iovec& part : step) comparison.add(part);
    });
    return result;
  }

  void close() {
    std::unique_ptr<Reply> reply = std::move(reply_);
    const GilReleased released;
    reply.reset();
  }

 private:
  static bool answers(const ReadEntry& entry, const ReadAnswer& row) {
    if (row.status > kLastStatus) return false;
    if (row.status != AskStatus::kDone) return row.num_bytes == 0;
    if (entry.offset != kWhole) return row.num_bytes == entry.num_bytes;
    return row.num_bytes == row.object_bytes && row.num_bytes <= entry.num_bytes;
  }

  static void add_parts(const Places& pieces, uint64_t num_bytes, std::vector<iovec>& parts) {
    if (pieces.empty() && num_bytes > 0) parts.push_back({nullptr, num_bytes});
    if (pieces.empty()) return;
    const uint64_t total = total_of(pieces);
    MK_CHECK(total == num_bytes, "receive: places must be of the ", num_bytes,
             " bytes that are sent, got ", total);
    for (const auto& [address, size] : pieces) {
      if (size > 0) parts.push_back(part_at(address, size));
    }
  }

  const std::string peer_;
  std::unique_ptr<Reply> reply_;
  std::vector<ReadAnswer> rows_;
};

std::unique_ptr<ObjectsReply> read_objects(Engine& engine, Peer& peer, const Keys& keys,
                                           const Words& offsets, const Words& sizes, bool sums,
                                           bool compare, double deadline_s) {
  const size_t count = num_keys(keys);
  MK_CHECK(static_cast<size_t>(offsets.size()) == count && offsets.size() == sizes.size(),
           "read_objects: keys, offsets and sizes must be as many");
  std::vector<ReadEntry> entries(count);
  for (size_t i = 0; i < count; ++i) {
    entries[i] = {keys_of(keys)[i], offsets.data()[i], sizes.data()[i]};
  }
  const uint32_t flags = (sums ? kAskSums : 0) | (compare ? kAskCompare : 0);
  const Question question{"read_objects", text_of(Ask::kRead, flags, entries), {}, true};
  const GilReleased released;
  const Deadline deadline = Deadline::after(deadline_s);
  auto reply = engine.ask(peer, question, deadline);
  return std::make_unique<ObjectsReply>(peer.name(), std::move(reply), entries, deadline);
}

py::array_t<uint8_t> statuses_of(const std::vector<AskStatus>& statuses) {
  return column<uint8_t>(statuses, [](AskStatus s) { return static_cast<uint8_t>(s); });
}

std::vector<AskStatus> ask_for_statuses(Engine& engine, Peer& peer, const Question& question,
                                        size_t count, double deadline_s) {
  const GilReleased released;
  const Deadline deadline = Deadline::after(deadline_s);
  const std::unique_ptr<Reply> reply = engine.ask(peer, question, deadline);
  auto rows = receive_rows<AskStatus>(*reply, count, peer.name(), /*is_all=*/true, deadline);
  for (const AskStatus status : rows) {
    if (status > kLastStatus) throw malformed(peer.name());
  }
  return rows;
}

py::array_t<uint8_t> write_objects(Engine& engine, Peer& peer, const Keys& keys,
                                   const std::vector<Places>& objects, bool verify,
                                   double deadline_s) {
  const size_t count = num_keys(keys);
  MK_CHECK(objects.size() == count, "write_objects: objects must be ", count, ", got ",
           objects.size());
  std::vector<WriteEntry> entries(count);
  uint64_t num_bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    entries[i] = {keys_of(keys)[i], total_of(objects[i]), 0};
    if (__builtin_add_overflow(num_bytes, entries[i].num_bytes, &num_bytes)) num_bytes = UINT64_MAX;
    MK_CHECK(num_bytes <= transfer::kMaxPayloadBytes, "write_objects: objects must be at most ",
             transfer::kMaxPayloadBytes, " bytes in all, got ", num_bytes);
  }
  std::vector<iovec> payload;
  {
    const GilReleased released;
    for (size_t i = 0; i < count; ++i) {
      store::Pieces all;
      for (const auto& [address, size] : objects[i]) {
        if (size == 0) continue;
        all.push_back({reinterpret_cast<char*>(address), size});
        payload.push_back(part_at(address, size));
      }
      if (verify) entries[i].checksum = store::checksum_of(all);
    }
  }
  const Question question{"write_objects", text_of(Ask::kWrite, 0, entries), std::move(payload),
                          false};
  return statuses_of(ask_for_statuses(engine, peer, question, count, deadline_s));
}

py::array_t<uint8_t> remove_objects(Engine& engine, Peer& peer, const Keys& keys,
                                    double deadline_s) {
  const std::vector<Key> all(keys_of(keys), keys_of(keys) + num_keys(keys));
  const Question question{"remove_objects", text_of(Ask::kRemove, 0, all), {}, false};
  return statuses_of(ask_for_statuses(engine, peer, question, all.size(), deadline_s));
}

// As Served in Python.
py::tuple take_done(ObjectService& service) {
  const ObjectService::Done done = service.take_done();
  const auto is_there = column<bool>(done.is_there, [](bool there) { return there; });
  return py::make_tuple(done.num_hits, done.num_misses, done.num_bytes, done.num_bytes_stored,
                        array_of(done.read), array_of(done.changed), is_there, done.is_cut);
}

}  // namespace

void bind_served_objects(py::module_& m, EngineClass& engine) {
  m.attr("WHOLE_OBJECT") = kWhole;
  m.attr("MAX_ASKED_KEYS") = kMaxAskedKeys;
  m.attr("MAX_ASKED_BYTES") = transfer::kMaxPayloadBytes;
  py::class_<ObjectService, std::shared_ptr<ObjectService>>(m, "ObjectService")
      .def(py::init([](std::shared_ptr<Pool> pool, bool is_all, bool may_write, bool checksums) {
             return std::make_shared<ObjectService>(
                 std::move(pool), ObjectService::Options{is_all, may_write, checksums});
           }),
           py::arg("pool"), py::arg("is_all"), py::arg("may_write"), py::arg("checksums"))
      .def("let_put", &ObjectService::let_put, py::arg("takes_puts"))
      .def("take_done", &take_done);
  py::class_<ObjectsReply>(m, "ObjectsReply")
      .def_property_readonly("statuses",
                             [](const ObjectsReply& reply) {
                               return column<uint8_t>(reply.rows(), [](const ReadAnswer& row) {
                                 return static_cast<uint8_t>(row.status);
                               });
                             })
      .def_property_readonly("object_bytes",
                             [](const ObjectsReply& reply) {
                               return column<uint64_t>(reply.rows(), [](const ReadAnswer& row) {
                                 return row.object_bytes;
                               });
                             })
      .def("receive", &ObjectsReply::receive, py::arg("places"), py::arg("verify"),
           py::arg("deadline_s"))
      .def("close", &ObjectsReply::close);
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
      .def("read_objects", &read_objects, py::arg("peer"), py::arg("keys"), py::arg("offsets"),
           py::arg("sizes"), py::arg("sums"), py::arg("compare"), py::arg("deadline_s"))
      .def("write_objects", &write_objects, py::arg("peer"), py::arg("keys"), py::arg("objects"),
           py::arg("verify"), py::arg("deadline_s"))
      .def("remove_objects", &remove_objects, py::arg("peer"), py::arg("keys"),
           py::arg("deadline_s"));
}

}  // namespace mk::host
