// Work: turns a transfer's ranges into as few work requests as possible.
//
//   for each range i:  remote[i .. i + n) = local[i .. i + n)      (a write; a read is the reverse)
//
// Ranges that are adjacent on the remote side share a request, which gathers (for a read: scatters)
// its local parts; ranges adjacent on both sides form one part.
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

namespace mk::rdma {

// Memory of another process, as its owner describes it.
struct RemotePiece {
  Span span;
  uint32_t rkey = 0;
};
struct RemoteRegion {
  Span span;
  Access access = 0;
  std::vector<RemotePiece> pieces;  // sorted by address, without gaps
};

struct Segment {
  uint64_t local = 0, remote = 0, num_bytes = 0;
};

struct Transfer {
  bool reads = false;
  RegionRef region;  // local; null if there are no segments: an immediate needs none
  std::shared_ptr<const RemoteRegion> remote;
  std::vector<Segment> segments;
  std::optional<uint32_t> immediate;  // delivered after all that the write writes
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

// The caller holds a Use of the region, if there is one. A transfer of no bytes with an immediate
// becomes one empty request. Throws InvalidArgument: a range outside its region, or a missing
// right. Replaces what `work` was; its buffers are used again.
void make_work(const Transfer& transfer, const WorkLimits& limits, WorkList& work);

}  // namespace mk::rdma
