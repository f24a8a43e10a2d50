#include "served/object_client.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "common/check.h"
#include "store/checksum.h"
#include "store/objects.h"
#include "transfer/base/error.h"
#include "transfer/wire/wire.h"

namespace mk::served {
namespace {

using store::Key;
using transfer::Deadline;
using transfer::Engine;
using transfer::kMaxRpcPayloadBytes;
using transfer::Peer;
using transfer::RpcRequest;
using transfer::RpcResponse;

template <class Entry>
std::string text_of(ObjectOp op, uint32_t flags, const std::vector<Entry>& entries) {
  MK_CHECK(!entries.empty() && entries.size() <= kMaxRequestKeys, "ask: keys must be 1 to ",
           kMaxRequestKeys, ", got ", entries.size());
  const ObjectsRequest header{op, flags, static_cast<uint32_t>(entries.size()), 0, {}};
  std::string request(sizeof(header) + entries.size() * sizeof(Entry), '\0');
  std::memcpy(request.data(), &header, sizeof(header));
  std::memcpy(request.data() + sizeof(header), entries.data(), entries.size() * sizeof(Entry));
  return request;
}

void expect(bool condition, const Peer& peer) {
  if (!condition) {
    throw transfer::TransferError(peer.name(), transfer::protocol_error("a malformed answer"));
  }
}

template <class T>
std::vector<T> receive_rows(RpcResponse& response, size_t count, const Deadline& deadline) {
  std::vector<T> rows(count);
  response.receive({{rows.data(), count * sizeof(T)}}, deadline);
  return rows;
}

bool answers(const ReadEntry& entry, const ReadRow& row) {
  if (row.status > kLastStatus) return false;
  if (row.status != ObjectStatus::kDone) return row.num_bytes == 0;
  if (entry.offset != kWhole) return row.num_bytes == entry.num_bytes;
  return row.num_bytes == row.object_bytes && row.num_bytes <= entry.num_bytes;
}

// The part of some memory that this many bytes fill, from its beginning.
Places first_bytes(const Places& places, uint64_t num_bytes) {
  Places first;
  for (const auto& [address, size] : places) {
    const uint64_t part = std::min(size, num_bytes);
    if (part > 0) first.emplace_back(address, part);
    num_bytes -= part;
  }
  return first;
}

std::vector<ObjectStatus> call_for_statuses(Engine& engine, Peer& peer, const RpcRequest& request,
                                            size_t count, ObjectStatus last, double deadline_s) {
  const Deadline deadline = Deadline::after(deadline_s);
  const std::unique_ptr<RpcResponse> response = engine.call(peer, request, deadline);
  expect(response->num_left() == count * sizeof(ObjectStatus), peer);
  auto statuses = receive_rows<ObjectStatus>(*response, count, deadline);
  for (const ObjectStatus status : statuses) expect(status <= last, peer);
  return statuses;
}

}  // namespace

std::unique_ptr<ObjectsResponse> read_objects(Engine& engine, Peer& peer,
                                              const std::vector<ReadEntry>& entries, uint32_t flags,
                                              double deadline_s) {
  const RpcRequest request{"read_objects", text_of(ObjectOp::kRead, flags, entries), {}, true};
  const Deadline deadline = Deadline::after(deadline_s);
  std::unique_ptr<RpcResponse> response = engine.call(peer, request, deadline);
  expect(response->num_left() >= entries.size() * sizeof(ReadRow), peer);
  auto rows = receive_rows<ReadRow>(*response, entries.size(), deadline);
  uint64_t left = response->num_left();
  bool is_sound = true;
  for (size_t i = 0; i < rows.size(); ++i) {
    is_sound &= rows[i].num_bytes <= left && answers(entries[i], rows[i]);
    left -= rows[i].num_bytes;
  }
  expect(is_sound && left == 0, peer);
  return std::make_unique<ObjectsResponse>(std::move(response), std::move(rows));
}

std::vector<int64_t> read_objects_into(Engine& engine, Peer& peer, const std::vector<Key>& keys,
                                       const std::vector<Places>& places, bool verify,
                                       double answer_s, double deadline_s) {
  const size_t count = keys.size();
  MK_CHECK(places.size() == count, "read_objects_into: places must be ", count, ", got ",
           places.size());
  const Deadline deadline = Deadline::after(deadline_s);
  std::vector<ReadEntry> entries(count);
  for (size_t i = 0; i < count; ++i) entries[i] = {keys[i], kWhole, total_of(places[i])};
  const uint32_t flags = verify ? kReadSums : 0;
  const auto response = read_objects(engine, peer, entries, flags, std::min(answer_s, deadline_s));
  const std::vector<ReadRow>& rows = response->rows();
  std::vector<Places> filled(count);
  for (size_t i = 0; i < count; ++i) filled[i] = first_bytes(places[i], rows[i].num_bytes);
  const auto is_right = std::make_unique<bool[]>(count);
  response->receive(filled, verify, deadline, is_right.get());
  std::vector<int64_t> sizes(count, -1);
  for (size_t i = 0; i < count; ++i) {
    if (rows[i].status == ObjectStatus::kDone && is_right[i]) {
      sizes[i] = static_cast<int64_t>(rows[i].object_bytes);
    }
  }
  return sizes;
}

std::vector<ObjectStatus> write_objects(Engine& engine, Peer& peer, const std::vector<Key>& keys,
                                        const std::vector<Places>& objects, uint32_t flags,
                                        bool verify, double deadline_s) {
  const size_t count = keys.size();
  MK_CHECK(objects.size() == count, "write_objects: objects must be ", count, ", got ",
           objects.size());
  std::vector<WriteEntry> entries(count);
  uint64_t num_bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    entries[i] = {keys[i], total_of(objects[i]), 0};
    if (__builtin_add_overflow(num_bytes, entries[i].num_bytes, &num_bytes)) num_bytes = UINT64_MAX;
    MK_CHECK(num_bytes <= kMaxRpcPayloadBytes, "write_objects: objects must be at most ",
             kMaxRpcPayloadBytes, " bytes in all, got ", num_bytes);
  }
  std::vector<iovec> payload;
  for (size_t i = 0; i < count; ++i) {
    store::Pieces pieces;
    for (const auto& [address, size] : objects[i]) {
      if (size == 0) continue;
      pieces.push_back({reinterpret_cast<char*>(address), size});
      payload.push_back({pieces.back().data, size});
    }
    if (verify) entries[i].checksum = store::checksum_of(pieces);
  }
  const RpcRequest request{"write_objects", text_of(ObjectOp::kWrite, flags, entries),
                           std::move(payload), false};
  const ObjectStatus last = (flags & kWritePublish) != 0 ? ObjectStatus::kLate : kLastStatus;
  return call_for_statuses(engine, peer, request, count, last, deadline_s);
}

std::vector<ObjectStatus> remove_objects(Engine& engine, Peer& peer, const std::vector<Key>& keys,
                                         double deadline_s) {
  const RpcRequest request{"remove_objects", text_of(ObjectOp::kRemove, 0, keys), {}, false};
  return call_for_statuses(engine, peer, request, keys.size(), kLastStatus, deadline_s);
}

}  // namespace mk::served
