// The wire format, version 6: docs/internals/wire.md holds the tables. Little-endian, fixed
// layouts.
//
//   both sides  Hello, name, HelloTail, addresses   once per connection, the initiator first
//   initiator   a proof of 32 bytes                 if both sides have a secret
//   target      Welcome
//   initiator   BatchHeader, Range[num_ranges], control bytes or payload
//   target      Ack, text (refused) or payload (read)
//
// Layer: transfer. Only the check_* functions validate what a peer sent: every count and size is
// bounded there, before anything is allocated or touched.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "transfer/base/error.h"
#include "transfer/base/range.h"

namespace mk::transfer {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "structs go over the wire as they are");

constexpr char kMagic[8] = {'M', 'K', 'T', 'R', 'N', 'S', 'F', 'R'};
constexpr uint32_t kWireVersion = 6;

constexpr uint32_t kMaxNameBytes = 255;           // also of an address
constexpr uint32_t kMaxBatchRanges = 8192;        // a table of 128 KiB
constexpr uint64_t kMaxWriteBytes = 16ull << 20;  // what a target receives before it confirms
constexpr uint64_t kMaxReadBytes = 256ull << 20;  // more: the next batch waits for this one
constexpr uint64_t kMaxNotificationBytes = 64 << 10;
constexpr uint32_t kMaxFencedLinks = 4096;
constexpr uint32_t kMaxRefusalBytes = 1024;
constexpr uint32_t kMaxListed = 65536;  // regions: an answer of 1.5 MiB
constexpr uint64_t kMaxRpcRequestBytes = 64 << 10;
constexpr uint64_t kMaxRpcPayloadBytes = 64ull << 20;                        // of a call
constexpr uint64_t kMaxRpcResponseBytes = kMaxRpcPayloadBytes + (64 << 10);  // as much, and a table

enum class Op : uint32_t {
  kWrite = 1,
  kRead = 2,
  kCheckWrite = 3,  // asks whether the ranges may be written; nothing moves
  kCheckRead = 4,
  kNotify = 5,
  kRegions = 6,  // asks for the target's regions, to map them; only within a machine
  kNics = 7,     // nic_wire.h: this op up to kFlush
  kAttach = 8,
  kDetach = 9,
  kKeys = 10,
  kFlush = 11,
  kFence = 12,        // ends other connections of the initiator's, of which it has lost its end
  kList = 13,         // asks for the target's regions
  kGpus = 14,         // asks for handles of regions in GPU memory; within a machine only
  kVerifyWrite = 15,  // compares checksums of ranges that may be written
  kVerifyRead = 16,
  kCall = 17,  // calls the target's Service: first_range bytes of request, then a payload
};

enum class Status : uint32_t { kDone = 0, kRefused = 1 };

// Why a target ends a new connection. reject_reason.h has the words.
enum class RejectReason : uint32_t {
  kNone = 0,
  kNoSecret = 1,        // the initiator has no secret, the target has one
  kUnwantedSecret = 2,  // the reverse
  kOtherSecret = 3,     // the proof is wrong
  kNoTls = 4,           // the target speaks TLS only
  kOldEpoch = 5,        // it has seen this or a later connection of the link
  kStillBusy = 6,       // the previous connection has not ended in time
  kFull = 7,            // it serves the maximum number of connections
  kUnwantedTls = 8,     // the initiator speaks TLS, the target does not
  kOtherAddress = 9,    // the initiator has dialled an address that is not the target's
};

using Bytes32 = std::array<unsigned char, 32>;

// The same in all versions.
struct Hello {
  char magic[8];
  uint32_t version;
  uint32_t name_bytes;
  uint64_t instance;  // random, new for every engine: distinguishes a restarted peer
};
static_assert(sizeof(Hello) == 24);

constexpr uint32_t kFlagSecret = 1;  // the sender has a secret
constexpr uint32_t kFlagTls = 2;     // the sender speaks TLS only

// One of an initiator's lasting connections, and how often it has been made.
struct Link {
  uint64_t id;     // random
  uint64_t epoch;  // counts up from 1
};

// Follows the name in this version, and is followed by the two addresses: the one that the
// initiator was given, "host:port", and the one that its connection leads to, see numeric_name().
struct HelloTail {
  uint32_t flags;
  uint16_t dialled_bytes;  // 0 in the target's, and so is the next
  uint16_t reached_bytes;
  Link link;  // zeros in the target's
  Bytes32 nonce;
};
static_assert(sizeof(HelloTail) == 56);

struct Welcome {
  RejectReason reject_reason;
  uint32_t zero;
  Bytes32 proof;  // the target's; zeros without a secret, or if the initiator is not welcome
};
static_assert(sizeof(Welcome) == 40);

struct BatchHeader {
  Op op;
  uint32_t num_ranges;
  uint64_t request_id;   // the same in all batches of one request; counts up from 1
  uint64_t first_range;  // index in the request of the batch's first range, for error texts; kAsk
  uint64_t num_bytes;    // of payload, to either side
  Bytes32 mac{};         // see FrameMacs; zeros where there are none
};
static_assert(sizeof(BatchHeader) == 64);

// Payload in memory begins at a multiple of this from the beginning of what it is a part of. The
// kernel copies both into its own pages, from their beginning if nothing else is in flight, and out
// of them again. Where it does so by `rep movsb`, a Zen 3 takes three times as long if the target
// of a copy is 1 to 31 bytes behind its source modulo 4096 (see common/copy_bytes.h): memory at
// pages, or 16 (malloc) or 64 bytes (torch) behind them, avoids that.
constexpr uint64_t kPayloadAlignment = 64;

struct Ack {
  Status status;
  uint32_t refusal_bytes;  // of text that follows; 0 unless refused
  uint64_t request_id;
  uint64_t num_bytes;         // of payload: written here, or following (read)
  uint64_t refusal_kind = 0;  // a FailureKind; 0: not told
  Bytes32 mac{};              // as above
};
static_assert(sizeof(Ack) == kPayloadAlignment);

// An entry of the answer to kRegions. How the initiator accesses the memory: `memory` is the index
// of a descriptor that the target has sent, from 0; kNoMemory: by the target's process and address.
struct RegionEntry {
  uint64_t address;
  uint64_t num_bytes;
  uint64_t generation;  // of the offer on the control page
  uint64_t offset;      // in that memory
  uint32_t slot;        // on the control page
  Rights rights;
  uint32_t memory;
  uint32_t location;  // 0: host memory; n + 1: of the target's cuda:n
};
static_assert(sizeof(RegionEntry) == 48);
constexpr uint32_t kNoMemory = 0xffffffff;
constexpr uint32_t kMaxLocation = 4096;
inline uint32_t location_of(int device) { return static_cast<uint32_t>(device + 1); }
inline int device_at(uint32_t location) { return static_cast<int>(location) - 1; }

// An entry of the answer to kGpus: a region, and the allocation that contains it.
struct GpuEntry {
  uint64_t address;                      // of the region
  uint64_t offset;                       // of the region in the allocation
  std::array<unsigned char, 64> handle;  // the driver's, by which another process opens it
  std::array<unsigned char, 16> gpu;     // UUID
  uint32_t error;                        // CUresult: why there is no handle; 0: there is
  uint32_t reserved;
};
static_assert(sizeof(GpuEntry) == 104);

// An entry of the answer to kList.
struct ListEntry {
  uint64_t address;
  uint64_t num_bytes;
  Rights rights;      // of peers
  uint32_t location;  // as above
};
static_assert(sizeof(ListEntry) == 24);

// Whether this op compares checksums; its Ack is followed by the number of leading ranges that
// agree.
inline bool verifies(Op op) { return op == Op::kVerifyWrite || op == Op::kVerifyRead; }
using NumEqual = uint64_t;

static_assert(sizeof(Range) == 16);  // address, num_bytes: an entry of the table

// Zero entries after the table.
inline uint32_t num_zero_ranges(const BatchHeader& header) {
  constexpr uint64_t kEntries = kPayloadAlignment / sizeof(Range);
  const uint64_t before = sizeof(BatchHeader) / sizeof(Range) + header.num_ranges;
  return header.op == Op::kWrite ? (kEntries - before % kEntries) % kEntries : 0;
}
constexpr uint32_t kMaxZeroRanges = kPayloadAlignment / sizeof(Range) - 1;

// What follows the table, says what to do, and is not data: a MAC covers it as well.
inline uint64_t num_control_bytes(const BatchHeader& header) {
  if (header.op == Op::kWrite || header.op == Op::kRead) return 0;
  return header.op == Op::kCall ? header.first_range : header.num_bytes;
}

// All throw Failure saying how the peer broke the protocol.
void check_magic(const Hello& hello);
void check_version(const Hello& hello);
void check_name(const std::string& name);  // printable ASCII
void check_tail(const HelloTail& tail);
void check_welcome(const Welcome& welcome);
void check_header(const BatchHeader& header);
void check_table(const BatchHeader& header, const Range* ranges);
void check_ack(const Ack& ack, uint64_t request_id, uint64_t num_bytes);
// An answer of any number of entries, or a refusal.
void check_response(const Ack& ack, uint64_t request_id, uint64_t entry_bytes, uint64_t max_bytes);
void check_region(const RegionEntry& entry, uint32_t max_memories);
void check_listed(const ListEntry& entry);

// What a peer that breaks the protocol has done.
ErrorReason protocol_error(const std::string& what);

// A peer's text, made safe to display.
std::string printable(std::string text);

}  // namespace mk::transfer
