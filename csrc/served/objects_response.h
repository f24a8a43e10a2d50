// ObjectsResponse: a peer's answer with the objects that it was asked for, being received.
//
//   const std::unique_ptr<ObjectsResponse> reply = read_objects(...);   // object_client.h
//   reply->receive(places, /*verify=*/true, Deadline::after(30.0), is_right);
//
// Layer: served, above store and transfer. Thread-safe: an answer is received once.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "served/object_wire.h"
#include "transfer/peer/rpc_client.h"

namespace mk::served {

// The memory of an object, in pieces: (address, bytes).
using Places = std::vector<std::pair<uint64_t, uint64_t>>;

uint64_t total_of(const Places& places);  // at most 2**64 - 1, whatever the sum is

class ObjectsResponse {
 public:
  // `reply` has as many bytes left as the rows say.
  ObjectsResponse(std::unique_ptr<transfer::RpcResponse> reply, std::vector<ReadRow> rows)
      : reply_(std::move(reply)), rows_(std::move(rows)) {}

  const std::vector<ReadRow>& rows() const { return rows_; }  // one for each key

  // For each object that is sent, where its bytes go; they are discarded if it has no entry. Then
  // is_right[i] is whether the object matches the checksum that the peer reported, or has none.
  // Throws TransferError; InvalidArgument: nothing was received.
  void receive(const std::vector<Places>& places, bool verify, const transfer::Deadline& deadline,
               bool* is_right);

  void close();  // without receiving it

 private:
  std::vector<iovec> parts_of(const std::vector<Places>& places) const;

  std::mutex mutex_;
  std::unique_ptr<transfer::RpcResponse> reply_;  // null: received or closed
  const std::vector<ReadRow> rows_;
};

}  // namespace mk::served
