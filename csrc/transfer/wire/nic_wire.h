// What two engines exchange about their NICs: docs/internals/wire.md, ops 7 to 11. Little-endian,
// fixed layouts.
//
//   kNics     the target answers NicEntry[]
//   kAttach   AttachRequest follows the header; the target answers QueuePairEntry
//   kDetach   DetachRequest follows the header; the answer is empty
//   kFlush    uint32_t rails[] follow, over each of which an immediate has been sent; the empty
//             answer says that it has arrived, and hence all earlier writes
//   kKeys     uint64_t addresses[] follow; the target answers, for the regions that contain these,
//             KeysEntry, KeyEntry[num_keys]; KeysEntry, ...
//
// Layer: transfer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "rdma/endpoint.h"
#include "rdma/work.h"
#include "transfer/base/range.h"
#include "transfer/memory/nics.h"

namespace mk::transfer {

constexpr uint32_t kMaxRails = kMaxNics;  // queue pairs of one connection
constexpr uint64_t kMaxKeysBytes = 64 << 20;

struct NicEntry {
  std::array<char, 64> name;  // printable, padded with zeros
  uint64_t mb_per_s;
  uint32_t link_layer;  // 0 unspecified, 1 InfiniBand, 2 Ethernet
  uint32_t is_active;   // whether its port can be used now
};
static_assert(sizeof(NicEntry) == 80);

struct QueuePairEntry {
  uint32_t number;
  uint32_t psn;
  uint32_t mtu;
  uint32_t max_reads_in;
  uint32_t lid;
  uint16_t link_layer;
  uint16_t gid_type;  // 0 unknown, 1 IB, 2 RoCE v1, 3 RoCE v2
  std::array<uint8_t, 16> gid;
};
static_assert(sizeof(QueuePairEntry) == 40);

struct AttachRequest {
  uint32_t rail;  // the initiator's number for it; what had that number before ends
  uint32_t nic;   // of the target's, as kNics counts
  QueuePairEntry initiator;
};
static_assert(sizeof(AttachRequest) == 48);

struct DetachRequest {
  uint32_t rail;
  uint32_t zero;
};
static_assert(sizeof(DetachRequest) == 8);

struct KeysEntry {
  uint64_t address;
  uint64_t num_bytes;
  NicSet near;
  Rights rights;
  uint32_t num_keys;
};
static_assert(sizeof(KeysEntry) == 32);

struct KeyEntry {
  uint64_t address;
  uint64_t num_bytes;
  uint32_t rkey;
  uint32_t nic;
};
static_assert(sizeof(KeyEntry) == 24);

uint32_t code_of_link_layer(const std::string& name);
QueuePairEntry entry_of(const rdma::Endpoint& endpoint);
rdma::Endpoint endpoint_of(const QueuePairEntry& entry);  // throws Failure

// A region of the peer's, as known to its NICs.
struct RemoteRegion {
  Range range;
  Rights rights;
  NicSet near;
  std::vector<std::shared_ptr<const rdma::RemoteRegion>> on_nics;  // null: not on that one
};

// An answer to kKeys, by address. Throws Failure.
std::vector<RemoteRegion> parse_keys(const std::vector<char>& bytes, size_t num_nics);

}  // namespace mk::transfer
