// The calls by which an engine reads, writes and removes objects of a peer's pool by their keys:
// the other side of ObjectService. Each is one round trip.
//
//   auto reply = read_objects(engine, peer, entries, kReadSums, /*deadline_s=*/5.0);
//   reply->rows()[0].status;   // and then its bytes: objects_response.h
//
// Layer: served, above store and transfer. They take 1 to kMaxRequestKeys keys, and throw
// TransferError; Unavailable: the peer refuses.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "served/object_wire.h"
#include "served/objects_response.h"
#include "transfer/engine/engine.h"

namespace mk::served {

// `flags`: kReadSums, kReadCompare. Returns once the peer has answered what it will send.
std::unique_ptr<ObjectsResponse> read_objects(transfer::Engine& engine, transfer::Peer& peer,
                                              const std::vector<ReadEntry>& entries, uint32_t flags,
                                              double deadline_s);

// Reads whole objects into memory that has room for them, places[i] for keys[i]: for each its size,
// or -1 where it has not arrived intact, whatever the reason. Less work than read_objects and a
// reply that is received by a second call. `verify`: checksums are compared. `answer_s` and
// `deadline_s`: from now, until the answer begins, and ends. On an exception the memory's contents
// are undefined.
std::vector<int64_t> read_objects_into(transfer::Engine& engine, transfer::Peer& peer,
                                       const std::vector<store::Key>& keys,
                                       const std::vector<Places>& places, bool verify,
                                       double answer_s, double deadline_s);

// `flags`: kWritePublish. `verify`: the peer compares checksums, which are calculated here.
std::vector<ObjectStatus> write_objects(transfer::Engine& engine, transfer::Peer& peer,
                                        const std::vector<store::Key>& keys,
                                        const std::vector<Places>& objects, uint32_t flags,
                                        bool verify, double deadline_s);

std::vector<ObjectStatus> remove_objects(transfer::Engine& engine, transfer::Peer& peer,
                                         const std::vector<store::Key>& keys, double deadline_s);

}  // namespace mk::served
