#include "rdma/work.h"

#include <algorithm>

#include "common/check.h"

namespace mk::rdma {
namespace {

// The piece that contains an address, which must be within the pieces; they have no gaps.
template <class Pieces>
auto find_piece(const Pieces& pieces, uint64_t address) {
  const auto after =
      std::upper_bound(pieces.begin(), pieces.end(), address,
                       [](uint64_t at, const auto& piece) { return at < piece.span.address; });
  return after - 1;
}

void check_rights(const Transfer& transfer) {
  const char* op = transfer.reads ? "read" : "write";
  MK_CHECK(!transfer.reads || (transfer.region->access() & (kLocalWrite | kRemoteWrite)), op,
           ": region must be registered for local writing, got one that is read-only");
  const Access needed = transfer.reads ? kRemoteRead : kRemoteWrite;
  MK_CHECK(transfer.remote->access & needed, op, ": remote must be registered with remote_", op,
           ", got one that is not");
  MK_CHECK(!transfer.reads || !transfer.immediate,
           "read: immediate must be None: only a write carries one");
}

void check_segment(const Transfer& transfer, size_t index) {
  const Segment& segment = transfer.segments[index];
  const auto check = [&](const char* which, Span region, Span range) {
    MK_CHECK(region.contains(range), transfer.reads ? "read" : "write", ": ", which, "[", index,
             "] must be within its region of ", region.num_bytes, " bytes, got ", range.num_bytes,
             " bytes at offset ", static_cast<int64_t>(range.address - region.address));
  };
  check("local", transfer.region->span(), {segment.local, segment.num_bytes});
  check("remote", transfer.remote->span, {segment.remote, segment.num_bytes});
}

class WorkBuilder {
 public:
  WorkBuilder(const Transfer& transfer, const WorkLimits& limits, WorkList& work)
      : transfer_(transfer),
        max_message_bytes_(limits.max_message_bytes),
        max_parts_(transfer.reads ? limits.max_sges_read : limits.max_sges_write),
        work_(work) {
    work_.reads = transfer.reads;
    work_.parts.clear();
    work_.requests.clear();
    work_.parts.reserve(transfer.segments.size());
    work_.requests.reserve(transfer.segments.size());
  }

  // Cuts where a piece ends on either side, or a message would become too long.
  void add(Segment segment) {
    while (segment.num_bytes > 0) {
      const auto local = find_piece(transfer_.region->pieces(), segment.local);
      const auto remote = find_piece(transfer_.remote->pieces, segment.remote);
      const uint64_t num_bytes =
          std::min({segment.num_bytes, local->span.end() - segment.local,
                    remote->span.end() - segment.remote, max_message_bytes_});
      add_part({segment.local, segment.remote, num_bytes}, local->mr->lkey, remote->rkey);
      segment.local += num_bytes;
      segment.remote += num_bytes;
      segment.num_bytes -= num_bytes;
    }
  }

  // An immediate needs a request to carry it.
  void finish() {
    if (work_.requests.empty() && transfer_.immediate) {
      const RemotePiece& piece = transfer_.remote->pieces.front();
      work_.requests.push_back({piece.span.address, piece.rkey, 0, 0, 0});
    }
  }

 private:
  void add_part(const Segment& part, uint32_t lkey, uint32_t rkey) {
    if (!continues(part, rkey)) {
      work_.requests.push_back({part.remote, rkey, 0, work_.parts.size(), 0});
    }
    WorkRequest* request = &work_.requests.back();
    if (!extends(*request, part, lkey)) {
      if (request->num_parts == static_cast<uint32_t>(max_parts_)) {
        work_.requests.push_back({part.remote, rkey, 0, work_.parts.size(), 0});
        request = &work_.requests.back();
      }
      work_.parts.push_back({part.local, 0, lkey});
      ++request->num_parts;
    }
    work_.parts.back().length += static_cast<uint32_t>(part.num_bytes);
    request->num_bytes += part.num_bytes;
  }

  // Whether it is adjacent to what the last request writes, on the remote side.
  bool continues(const Segment& part, uint32_t rkey) const {
    if (work_.requests.empty()) return false;
    const WorkRequest& last = work_.requests.back();
    return last.rkey == rkey && last.remote + last.num_bytes == part.remote &&
           last.num_bytes + part.num_bytes <= max_message_bytes_;
  }

  // Whether it is adjacent to the request's last part, on the local side.
  bool extends(const WorkRequest& request, const Segment& part, uint32_t lkey) const {
    if (request.num_parts == 0) return false;
    const ibv_sge& last = work_.parts.back();
    return last.lkey == lkey && last.addr + last.length == part.local;
  }

  const Transfer& transfer_;
  const uint64_t max_message_bytes_;
  const int max_parts_;
  WorkList& work_;
};

}  // namespace

void make_work(const Transfer& transfer, const WorkLimits& limits, WorkList& work) {
  check_rights(transfer);
  for (size_t i = 0; i < transfer.segments.size(); ++i) check_segment(transfer, i);
  WorkBuilder builder(transfer, limits, work);
  for (const Segment& segment : transfer.segments) builder.add(segment);
  builder.finish();
}

}  // namespace mk::rdma
