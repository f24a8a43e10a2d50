// What a target tells of its NICs' keys, and of a queue pair.
#include <cstring>

#include "common/check.h"
#include "fuzz.h"
#include "transfer/wire/nic_wire.h"

using namespace mk;
using namespace mk::transfer;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const std::vector<char> bytes(data, data + num_bytes);
  try {
    uint64_t end = 0;
    for (const RemoteRegion& region : parse_keys(bytes, 4)) {
      FUZZ_EXPECT(region.range.address >= end && region.on_nics.size() == 4);
      end = region.range.address + region.range.num_bytes;
      for (const auto& on_nic : region.on_nics) {
        if (!on_nic) continue;
        uint64_t covered = 0;
        for (const rdma::RemotePiece& piece : on_nic->pieces) covered += piece.span.num_bytes;
        FUZZ_EXPECT(covered == region.range.num_bytes);
      }
    }
  } catch (const Failure&) {
  }
  if (num_bytes < sizeof(QueuePairEntry)) return 0;
  QueuePairEntry entry;
  std::memcpy(&entry, data, sizeof(entry));
  try {
    const rdma::Endpoint endpoint = endpoint_of(entry);
    rdma::check_compatible({1, 1, 0, {}, "", endpoint.link_layer, 1024, 1}, endpoint);
    FUZZ_EXPECT(endpoint.mtu >= 256);
  } catch (const Failure&) {
  } catch (const InvalidArgument&) {
  }
  return 0;
}
