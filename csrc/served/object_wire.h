// Requests about a pool's objects over a transfer engine's connection, and their answers:
// docs/internals/wire_objects.md has the tables. Little-endian, fixed layouts.
//
//   request    ObjectsRequest, ReadEntry[], WriteEntry[] or Key[]
//   payload    the objects to write, one after the other
//   answer     read: ReadRow[], then the bytes; else one status each
//
// Layer: served, above store and transfer.
#pragma once

#include <cstdint>

#include "store/layout.h"

namespace mk::served {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structs go over the wire as they are");

constexpr uint32_t kMaxRequestKeys = 1024;

enum class ObjectOp : uint32_t { kRead = 1, kWrite = 2, kRemove = 3 };

constexpr uint32_t kReadSums = 1;      // read: checksums of what is sent, even where none is stored
constexpr uint32_t kReadCompare = 2;   // read: what differs from its stored checksum is not sent
constexpr uint32_t kWritePublish = 4;  // write: only what can be listed in the directory is stored

enum class ObjectStatus : uint32_t {
  kAbsent = 0,        // or still being written
  kDone = 1,          // sent, stored, removed
  kDamaged = 2,       // it differs from its checksum; nothing was sent or stored
  kBusy = 3,          // no room in this answer, or in the process: ask again
  kDoesNotFit = 4,    // larger than what is asked for, or ends before it
  kTooLarge = 5,      // for any answer
  kExists = 6,        // nothing was stored
  kBeingWritten = 7,  // likewise
  kFull = 8,          // likewise
  kElsewhere = 9,     // not in the pool, but its owner may have it elsewhere
  // For kWritePublish only. Nothing was stored, since
  kUnlisted = 10,  // it could not be listed
  kUnsure = 11,    // it is not known whether it is listed
  kLate = 12,      // likewise, because the directory has not answered in time
};

constexpr ObjectStatus kLastStatus = ObjectStatus::kElsewhere;  // of other requests

struct ObjectsRequest {
  ObjectOp op;
  uint32_t flags;
  uint32_t num_keys;
  uint32_t zero;
  uint64_t zeros[2];  // aligns the payload, see kPayloadAlignment in transfer/wire/wire.h
};
static_assert(sizeof(ObjectsRequest) == 32);

constexpr uint64_t kWhole = UINT64_MAX;  // as an offset: the whole object, if there is room

struct ReadEntry {
  store::Key key;
  uint64_t offset;
  uint64_t num_bytes;  // from there on; for kWhole, the maximum
};
static_assert(sizeof(ReadEntry) == 32);

struct ReadRow {
  uint64_t object_bytes;
  uint64_t num_bytes;  // that follow; 0 unless kDone
  uint64_t checksum;   // of these bytes; 0: none
  ObjectStatus status;
  uint32_t zero;
};
static_assert(sizeof(ReadRow) == 32);

struct WriteEntry {
  store::Key key;
  uint64_t num_bytes;
  uint64_t checksum;  // 0: not compared
};
static_assert(sizeof(WriteEntry) == 32);

}  // namespace mk::served
