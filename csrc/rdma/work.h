// Work: a transfer's ranges as the work requests of a NIC, as few as they can be.
//
//   for each range i:  remote[i .. i + n) = local[i .. i + n)      (a write; a read the other way)
//
// Ranges that continue each other on the remote side share a request, which gathers (a read:
// scatters) its local parts; those that continue each other on both sides are one part.
//
// Layer: rdma.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "rdma/memory_region.h"
#include "rdma/span.h"
#include "rdma/verbs.h"

#if MK_HAVE_VERBS
namespace mk::rdma {

// Memory of another process, as its owner describes it.
struct RemotePiece {
  Span span;
  uint32_t rkey = 0;
};
struct RemoteRegion {
  Span span;
  Access access = 0;
  std::vector<RemotePiece> pieces;  // in the order of their addresses, without holes
};

struct Segment {
  uint64_t local = 0, remote = 0, num_bytes = 0;
};

struct Transfer {
  bool reads = false;
  RegionRef region;  // local
  std::shared_ptr<const RemoteRegion> remote;
  std::vector<Segment> segments;
  std::optional<uint32_t> immediate;  // delivered after all that a write writes
  uint64_t token = 0;
};

struct WorkRequest {
  uint64_t remote = 0;
  uint32_t rkey = 0;
  uint32_t num_parts = 0;
  size_t first_part = 0;
  uint64_t num_bytes = 0;
};
struct WorkList {
  bool reads = false;
  std::vector<ibv_sge> parts;
  std::vector<WorkRequest> requests;
};

struct WorkLimits {
  int max_sges_write = 1, max_sges_read = 1;
  uint64_t max_message_bytes = 1u << 30;
};

// The caller holds a Use of the region. A transfer that moves nothing but has an immediate is one
// empty request. Throws InvalidArgument: a range outside of its region, or a right that is missing.
WorkList make_work(const Transfer& transfer, const WorkLimits& limits);

}  // namespace mk::rdma
#endif
