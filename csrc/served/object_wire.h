// What is asked of a pool's objects over a transfer engine's connection, and answered: docs/wire.md
// holds the tables. Little-endian, fixed layouts.
//
//   question   AskHeader, ReadEntry[], WriteEntry[] or Key[]
//   payload    the objects that are written, one behind the other
//   answer     read: ReadAnswer[], and behind these the bytes; else a status each
//
// Layer: served, above store and transfer.
#pragma once

#include <cstdint>

#include "store/layout.h"

namespace mk::served {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structs go over the wire as they are");

constexpr uint32_t kMaxAskedKeys = 1024;

enum class Ask : uint32_t { kRead = 1, kWrite = 2, kRemove = 3 };

constexpr uint32_t kAskSums = 1;     // read: checksums of what is sent, also where none is stored
constexpr uint32_t kAskCompare = 2;  // read: what differs from its stored checksum is not sent

enum class AskStatus : uint32_t {
  kAbsent = 0,        // also: somebody writes it just now
  kDone = 1,          // sent, stored, removed
  kDamaged = 2,       // it differs from its checksum; nothing was sent, or stored
  kBusy = 3,          // this answer, or the process, has no room for it: to be asked again
  kDoesNotFit = 4,    // the object is larger than what is asked for, or ends before it
  kTooLarge = 5,      // for any answer
  kExists = 6,        // nothing was stored
  kBeingWritten = 7,  // likewise
  kFull = 8,          // likewise
  kElsewhere = 9,     // not in the pool, but its owner may have it elsewhere
};

constexpr AskStatus kLastStatus = AskStatus::kElsewhere;

struct AskHeader {
  Ask ask;
  uint32_t flags;
  uint32_t num_keys;
  uint32_t zero;
  uint64_t zeros[2];  // for the payload's sake, see kPayloadAlignment in transfer/wire.h
};
static_assert(sizeof(AskHeader) == 32);

constexpr uint64_t kWhole = UINT64_MAX;  // as an offset: all of it, if there is room

struct ReadEntry {
  store::Key key;
  uint64_t offset;
  uint64_t num_bytes;  // from there on; of kWhole at most so many
};
static_assert(sizeof(ReadEntry) == 32);

struct ReadAnswer {
  uint64_t object_bytes;
  uint64_t num_bytes;  // that follow; 0 unless kDone
  uint64_t checksum;   // of these; 0: none
  AskStatus status;
  uint32_t zero;
};
static_assert(sizeof(ReadAnswer) == 32);

struct WriteEntry {
  store::Key key;
  uint64_t num_bytes;
  uint64_t checksum;  // 0: not compared
};
static_assert(sizeof(WriteEntry) == 32);

}  // namespace mk::served
