#include "transfer/wire/nic_wire.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

const char* const kLinkLayers[] = {"Unspecified", "InfiniBand", "Ethernet"};
const char* const kGidTypes[] = {"", "IB", "RoCE v1", "RoCE v2"};

template <size_t kCount>
uint32_t code_of(const char* const (&names)[kCount], const std::string& name) {
  const auto found = std::find(std::begin(names), std::end(names), name);
  return found == std::end(names) ? 0 : static_cast<uint32_t>(found - std::begin(names));
}

void expect(bool condition, const char* what) {
  if (!condition) throw Failure(concat("protocol error: ", what), FailureKind::kIncompatible);
}

// Takes an entry from the front of what is left.
template <class Entry>
Entry take(const char*& at, const char* end) {
  expect(static_cast<size_t>(end - at) >= sizeof(Entry), "keys are cut short");
  Entry entry;
  std::memcpy(&entry, at, sizeof(entry));
  at += sizeof(entry);
  return entry;
}

// Whether a NIC's pieces cover the whole region, in order and without gaps, or none of it.
bool is_whole(const rdma::RemoteRegion& region) {
  uint64_t next = region.span.address;
  for (const rdma::RemotePiece& piece : region.pieces) {
    if (piece.span.address != next || piece.span.num_bytes == 0 ||
        piece.span.num_bytes > region.span.end() - next) {
      return false;
    }
    next = piece.span.end();
  }
  return next == region.span.end();
}

}  // namespace

uint32_t code_of_link_layer(const std::string& name) { return code_of(kLinkLayers, name); }

QueuePairEntry entry_of(const rdma::Endpoint& endpoint) {
  QueuePairEntry entry{};
  entry.number = endpoint.qp_num;
  entry.psn = endpoint.psn;
  entry.mtu = static_cast<uint32_t>(endpoint.mtu);
  entry.max_reads_in = static_cast<uint32_t>(endpoint.max_reads_in);
  entry.lid = endpoint.lid;
  entry.link_layer = static_cast<uint16_t>(code_of_link_layer(endpoint.link_layer));
  entry.gid_type = static_cast<uint16_t>(code_of(kGidTypes, endpoint.gid_type));
  entry.gid = endpoint.gid;
  return entry;
}

rdma::Endpoint endpoint_of(const QueuePairEntry& entry) {
  expect(entry.link_layer < std::size(kLinkLayers) && entry.gid_type < std::size(kGidTypes) &&
             entry.mtu <= 4096 && entry.max_reads_in <= 255 && entry.lid <= 0xffff,
         "malformed queue pair");
  return {entry.number,
          entry.psn,
          static_cast<uint16_t>(entry.lid),
          entry.gid,
          kGidTypes[entry.gid_type],
          kLinkLayers[entry.link_layer],
          static_cast<int>(entry.mtu),
          static_cast<int>(entry.max_reads_in)};
}

std::vector<RemoteRegion> parse_keys(const std::vector<char>& bytes, size_t num_nics) {
  std::vector<RemoteRegion> regions;
  uint64_t end_before = 0;
  for (const char *at = bytes.data(), *end = at + bytes.size(); at < end;) {
    const auto entry = take<KeysEntry>(at, end);
    expect(entry.num_bytes > 0 && entry.num_bytes <= UINT64_MAX - entry.address &&
               entry.address >= end_before,
           "malformed region");
    end_before = entry.address + entry.num_bytes;
    const rdma::RemoteRegion none{{entry.address, entry.num_bytes}, entry.rights, {}};
    std::vector<rdma::RemoteRegion> on_nics(num_nics, none);
    for (uint32_t i = 0; i < entry.num_keys; ++i) {
      const auto key = take<KeyEntry>(at, end);
      expect(key.nic < num_nics, "a key of no NIC");
      on_nics[key.nic].pieces.push_back({{key.address, key.num_bytes}, key.rkey});
    }
    RemoteRegion& region = regions.emplace_back(
        RemoteRegion{{entry.address, entry.num_bytes}, entry.rights, entry.near, {}});
    for (rdma::RemoteRegion& on_nic : on_nics) {
      const bool is_there = !on_nic.pieces.empty();
      expect(!is_there || is_whole(on_nic), "keys that do not cover their region");
      region.on_nics.push_back(
          is_there ? std::make_shared<const rdma::RemoteRegion>(std::move(on_nic)) : nullptr);
    }
  }
  return regions;
}

}  // namespace mk::transfer
