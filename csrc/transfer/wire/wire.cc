#include "transfer/wire/wire.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/memory/control_page.h"
#include "transfer/wire/nic_wire.h"

namespace mk::transfer {
namespace {

bool is_printable(char c) { return c >= ' ' && c <= '~'; }

template <class... Parts>
void expect(bool condition, const Parts&... parts) {
  if (!condition) throw Failure(protocol_error(concat(parts...)));
}

bool moves_data(Op op) { return op == Op::kWrite || op == Op::kRead; }

struct Bounds {
  uint64_t least, most;
  bool include(uint64_t number) const { return least <= number && number <= most; }
};

constexpr Bounds kNone{0, 0};
constexpr Bounds kRanges{1, kMaxBatchRanges};

// What a header may say of what follows it.
struct Announced {
  const char* what;  // in errors
  Bounds ranges;
  Bounds bytes;              // of payload
  uint64_t entry_bytes = 1;  // of which it consists
};

Announced may_announce(const BatchHeader& header) {
  const auto exactly = [](uint64_t num_bytes) { return Bounds{num_bytes, num_bytes}; };
  const auto entries = [](uint64_t entry_bytes, uint64_t most) {
    return Announced{"question", kNone, {0, most * entry_bytes}, entry_bytes};
  };
  switch (header.op) {
    case Op::kWrite:
      return {"batch", kRanges, {1, kMaxWriteBytes}};
    case Op::kRead:
      return {"batch", kRanges, {1, kMaxReadBytes}};
    case Op::kCheckWrite:
    case Op::kCheckRead:
      return {"check", kRanges, kNone};
    case Op::kVerifyWrite:
    case Op::kVerifyRead:
      return {"check", kRanges, exactly(header.num_ranges * sizeof(uint64_t))};
    case Op::kNotify:
      return {"notification", kNone, {0, kMaxNotificationBytes}};
    case Op::kRegions:
    case Op::kGpus:
    case Op::kList:
    case Op::kNics:
      return {"question", kNone, kNone};
    case Op::kAttach:
      return {"question", kNone, exactly(sizeof(AttachRequest))};
    case Op::kDetach:
      return {"question", kNone, exactly(sizeof(DetachRequest))};
    case Op::kKeys:
      return entries(sizeof(uint64_t), kMaxBatchRanges);
    case Op::kFlush:
      return entries(sizeof(uint32_t), kMaxRails);
    case Op::kFence:
      return entries(sizeof(Link), kMaxFencedLinks);
    case Op::kCall: {
      const uint64_t question_bytes = header.first_range;
      expect(question_bytes >= 1 && question_bytes <= kMaxRpcRequestBytes, "question of ",
             question_bytes, " bytes");
      return {"question", kNone, {question_bytes, question_bytes + kMaxRpcPayloadBytes}};
    }
  }
  throw Failure(protocol_error(concat("unknown op ", static_cast<uint32_t>(header.op))));
}

}  // namespace

void check_magic(const Hello& hello) {
  if (std::memcmp(hello.magic, kMagic, sizeof(kMagic)) != 0) {
    throw Failure("the peer is not a mooncake_kernels engine", FailureKind::kIncompatible);
  }
  expect(hello.name_bytes >= 1 && hello.name_bytes <= kMaxNameBytes, "name of ", hello.name_bytes,
         " bytes");
}

void check_version(const Hello& hello) {
  if (hello.version != kWireVersion) {
    throw Failure(concat("the peer speaks wire version ", hello.version, ", this engine speaks ",
                         kWireVersion),
                  FailureKind::kIncompatible);
  }
}

void check_name(const std::string& name) {
  expect(std::all_of(name.begin(), name.end(), is_printable), "name is not printable");
  // Receivers open senders by their names, see DiskFile.
  expect(name.compare(0, 5, "file:") != 0, "name is a file's");
}

void check_tail(const HelloTail& tail) {
  expect((tail.flags & ~(kFlagSecret | kFlagTls)) == 0, "hello with flags ", tail.flags);
  const auto longest = std::max(tail.dialled_bytes, tail.reached_bytes);
  expect(longest <= kMaxNameBytes, "address of ", longest, " bytes");
}

void check_welcome(const Welcome& welcome) {
  expect(welcome.reject_reason <= RejectReason::kOtherAddress && welcome.zero == 0,
         "welcome with reject reason ", static_cast<uint32_t>(welcome.reject_reason));
}

void check_header(const BatchHeader& header) {
  const Announced may = may_announce(header);
  expect(may.ranges.include(header.num_ranges), may.what, " of ", header.num_ranges, " ranges");
  expect(may.bytes.include(header.num_bytes) && header.num_bytes % may.entry_bytes == 0, may.what,
         " of ", header.num_bytes, " bytes");
}

void check_table(const BatchHeader& header, const Range* ranges) {
  uint64_t room = header.num_bytes;  // ranges that are only checked may be of any size
  for (uint32_t i = 0; i < header.num_ranges; ++i) {
    expect(ranges[i].num_bytes >= 1, "range ", i, " is empty");
    if (!moves_data(header.op)) continue;
    expect(ranges[i].num_bytes <= room, "the ranges exceed the payload");
    room -= ranges[i].num_bytes;
  }
  expect(room == 0 || !moves_data(header.op), "the ranges fall ", room, " bytes short");
}

void check_ack(const Ack& ack, uint64_t request_id, uint64_t num_bytes) {
  expect(ack.request_id == request_id, "ack of request ", ack.request_id, " instead of ",
         request_id);
  if (ack.status == Status::kRefused) {
    expect(ack.refusal_bytes >= 1 && ack.refusal_bytes <= kMaxRefusalBytes && ack.num_bytes == 0,
           "malformed refusal");
    return;
  }
  expect(ack.status == Status::kDone, "ack with status ", static_cast<uint32_t>(ack.status));
  expect(ack.refusal_bytes == 0 && ack.num_bytes == num_bytes, "ack of ", ack.num_bytes,
         " bytes instead of ", num_bytes);
}

void check_response(const Ack& ack, uint64_t request_id, uint64_t entry_bytes, uint64_t max_bytes) {
  check_ack(ack, request_id, ack.num_bytes);
  expect(ack.num_bytes % entry_bytes == 0 && ack.num_bytes <= max_bytes, "answer of ",
         ack.num_bytes, " bytes");
}

void check_region(const RegionEntry& entry, uint32_t max_memories) {
  expect(entry.num_bytes > 0 && entry.num_bytes <= UINT64_MAX - entry.address &&
             entry.slot < ControlPage::kNumSlots && entry.generation != 0 &&
             (entry.memory == kNoMemory || entry.memory < max_memories) &&
             entry.location <= kMaxLocation,
         "malformed region");
}

void check_listed(const ListEntry& entry) {
  expect(entry.num_bytes > 0 && entry.num_bytes <= UINT64_MAX - entry.address &&
             entry.rights != 0 && (entry.rights & ~(kRemoteRead | kRemoteWrite)) == 0 &&
             entry.location <= kMaxLocation,
         "malformed region");
}

ErrorReason protocol_error(const std::string& what) {
  return {concat("protocol error: ", what), FailureKind::kIncompatible};
}

std::string printable(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return !is_printable(c); }, '?');
  return text;
}

}  // namespace mk::transfer
