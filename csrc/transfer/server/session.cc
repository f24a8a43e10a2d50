#include "transfer/server/session.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "common/fault_guard.h"
#include "transfer/base/error.h"
#include "transfer/channel/checksum.h"
#include "transfer/request/piece.h"
#include "transfer/wire/reject_reason.h"

namespace mk::transfer {
namespace {

constexpr double kFirstByteS = 2;  // for the beginning of the handshake, once connected
constexpr double kGreetingS = 10;  // for all of it
constexpr double kLingerS = 1;     // for a rejected peer to read the reason
constexpr double kBatchS = 60;     // to send the rest of a batch, or to receive what it requested

// As the initiator sees it.
ErrorReason at_the_peer(const ErrorReason& reason) {
  const bool is_memory = reason.kind == FailureKind::kInaccessible;
  return {concat(is_memory ? "the peer's " : "at the peer: ", reason.text), reason.kind};
}

}  // namespace

void Session::run() noexcept {
  try {
    const Links::Hold hold = greet();  // held while memory may be touched
    socket_.spin_for(own_.spin);
    serve_all();
  } catch (const std::exception&) {
    // It was never admitted.
  }
  liveness_.reset();
  if (page_) {
    if (socket_.peer_has_left()) page_->end();
    own_.regions.forget(page_);
  }
  socket_.close();
  finished_ = true;
}

void Session::serve_all() {
  try {
    while (true) serve_next();
  } catch (const Forged& forged) {
    own_.rejections.count(forged.what());
  } catch (const std::exception&) {
    // The peer left or violates the protocol. It learns of it from the closed connection.
  }
  rdma_.close();
}

Links::Hold Session::greet() {
  const Limit limit{Deadline::after(kGreetingS), interrupt_};
  Reception reception(socket_, own_, limit);
  try {
    socket_.peek({Deadline::after(kFirstByteS), interrupt_});
    visit_.speaks();
    return let_in(reception, limit);
  } catch (const Failure& failure) {
    // A client that only probes the port does not count as rejected, nor one whose next connection
    // was faster, as after a cancelled request.
    const auto* const rejected = dynamic_cast<const Rejected*>(&failure);
    const bool is_old = rejected && rejected->reject_reason == RejectReason::kOldEpoch;
    if (!is_old && !dynamic_cast<const LinkDown*>(&failure)) {
      own_.rejections.count(failure.what());
    }
    visit_.is_turned_away();
    if (rejected) reception.reject(rejected->reject_reason);
    socket_.linger({Deadline::after(kLingerS), interrupt_});
    throw;
  }
}

Links::Hold Session::let_in(Reception& reception, const Limit& limit) {
  const Greeting& peer = reception.meet();
  const Credentials& required = own_.credentials;
  visit_.admit(required.secret || (required.tls && required.tls->verifies_peers()) ||
               socket_.is_own());
  link_ = {peer.hello.instance, peer.tail.link.id};
  Links::Hold hold = gate_.links.enter(link_, peer.tail.link.epoch, interrupt_, limit);
  peer_name_ = peer.name;
  reception.welcome();
  return hold;
}

void Session::serve_next() {
  BatchHeader header;
  char* const start = reinterpret_cast<char*>(&header);
  const Limit idling{Deadline::never(), interrupt_};
  const size_t num_bytes = socket_.receive_some(start, sizeof(header), idling);
  visit_.is_busy(true);
  const Limit limit{Deadline::after(kBatchS), interrupt_};
  socket_.receive(start + num_bytes, sizeof(header) - num_bytes, limit);
  check_header(header);
  table_.resize(header.num_ranges + num_zero_ranges(header));
  socket_.receive(table_.data(), table_.size() * sizeof(Range), limit);
  table_.resize(header.num_ranges);
  check_table(header, table_.data());
  control_.resize(num_control_bytes(header));
  socket_.receive(control_.data(), control_.size(), limit);
  verify(socket_.frame_macs(), header,
         {{table_.data(), table_.size() * sizeof(Range)}, {control_.data(), control_.size()}});
  serve(header, limit);
  visit_.is_busy(false);
}

void Session::serve(const BatchHeader& header, const Limit& limit) {
  switch (header.op) {
    case Op::kWrite:
      return receive_write(header, limit);
    case Op::kRead:
      return send_read(header, limit);
    case Op::kNotify:
      return receive_notification(header, limit);
    case Op::kRegions:
      return send_regions(header, limit);
    case Op::kGpus:
      return send_gpus(header, limit);
    case Op::kFence:
      return end_links(header, limit);
    case Op::kNics:
    case Op::kAttach:
    case Op::kDetach:
    case Op::kKeys:
    case Op::kFlush:
      return answer_nic_query(header, limit);
    case Op::kList:
      return send_list(header, limit);
    case Op::kCall:
      return handle_rpc(header, limit);
    case Op::kVerifyWrite:
    case Op::kVerifyRead:
      return compare_checksums(header, limit);
    case Op::kCheckWrite:
    case Op::kCheckRead:
      break;
  }
  try {
    check(header, header.op == Op::kCheckWrite ? kRemoteWrite : kRemoteRead);
  } catch (const Refused& refused) {
    return refuse(header, refused.reason(), limit);
  }
  acknowledge(header, limit);
}

void Session::receive_write(const BatchHeader& header, const Limit& limit) {
  ErrorReason failure;
  try {
    check_offered();
    const std::vector<RegionRef> regions = check(header, kRemoteWrite);
    const Pin pin = own_.regions.pin(regions, interrupt_);
    const auto receive = [&](iovec* parts, size_t n) { socket_.receive(parts, n, limit); };
    failure = staging_.scatter(parts_of_table(), GpuRanges(regions), limit, receive);
  } catch (const Refused& refused) {  // thrown before the first byte of payload was received
    socket_.discard(header.num_bytes, limit);
    return refuse(header, refused.reason(), limit);
  }
  if (!failure.empty()) return refuse(header, at_the_peer(failure), limit);
  acknowledge(header, limit);
}

void Session::send_read(const BatchHeader& header, const Limit& limit) {
  try {
    check_offered();
    const std::vector<RegionRef> regions = check(header, kRemoteRead);
    const Pin pin = own_.regions.pin(regions, interrupt_);
    expect_readable(regions);
    Ack ack{Status::kDone, 0, header.request_id, header.num_bytes};
    sign(socket_.frame_macs(), ack, {});
    std::vector<iovec>& parts = parts_of_table();
    parts.insert(parts.begin(), {&ack, sizeof(ack)});
    const GpuRanges gpus(regions);
    const auto send = [&](iovec* host, size_t n) {  // staging memory is filled again
      gpus.empty() ? socket_.send_lent(host, n, 1, limit) : socket_.send(host, n, limit);
    };
    try {
      staging_.gather(parts, gpus, limit, send);
    } catch (const Inaccessible& fault) {
      // Half of an answer cannot be taken back, nor the number of one that has a MAC: the
      // connection ends, and once the request is sent again, it is refused.
      for (const RegionRef& region : regions) *region->is_doubted = true;
      if (fault.num_bytes_moved > 0 || !gpus.empty() || socket_.frame_macs()) throw;
      throw Refused(at_the_peer(fault.reason()));
    }
    socket_.settle(socket_.num_lent(), limit);
  } catch (const Refused& refused) {
    refuse(header, refused.reason(), limit);
  }
}

void Session::compare_checksums(const BatchHeader& header, const Limit& limit) {
  checksums_.resize(header.num_ranges);
  std::memcpy(checksums_.data(), control_.data(), control_.size());
  NumEqual num_equal = 0;
  try {
    const Rights needed = header.op == Op::kVerifyWrite ? kRemoteWrite : kRemoteRead;
    const std::vector<RegionRef> regions = check(header, needed);
    const Pin pin = own_.regions.pin(regions, interrupt_);
    num_equal = Checksummer(GpuRanges(regions), staging_, limit).count_equal(table_, checksums_);
  } catch (const Refused& refused) {
    return refuse(header, refused.reason(), limit);
  } catch (const GpuFailure& failure) {
    return refuse(header, at_the_peer(failure.reason()), limit);
  } catch (const Inaccessible& fault) {
    return refuse(header, at_the_peer(fault.reason()), limit);
  }
  respond(header, &num_equal, sizeof(num_equal), limit);
}

void Session::receive_notification(const BatchHeader& header, const Limit& limit) {
  try {
    check(header, 0);
    own_.notifications.push(peer_name_, std::move(control_));
  } catch (const Refused& refused) {
    return refuse(header, refused.reason(), limit);
  }
  acknowledge(header, limit);
}

void Session::end_links(const BatchHeader& header, const Limit& limit) {
  std::vector<Link> links(control_.size() / sizeof(Link));
  if (!links.empty()) std::memcpy(links.data(), control_.data(), control_.size());
  try {
    for (const Link& link : links) {
      if (link.id == link_.link) throw Failure(protocol_error("a connection that fences itself"));
      gate_.links.fence({link_.instance, link.id}, link.epoch, limit);
    }
  } catch (const Refused& refused) {
    return refuse(header, refused.reason(), limit);
  }
  acknowledge(header, limit);
}

void Session::answer_nic_query(const BatchHeader& header, const Limit& limit) {
  const std::vector<char> query(control_.begin(), control_.end());
  std::string found;
  try {
    found = rdma_.respond(header.op, query, limit);
  } catch (const Refused& refused) {
    return refuse(header, refused.reason(), limit);
  }
  respond(header, found.data(), found.size(), limit);
}

void Session::handle_rpc(const BatchHeader& header, const Limit& limit) {
  // The service may lock robust mutexes, such as a pool's. They would stay locked for ever if the
  // thread died while the liveness word's list replaces its own.
  liveness_.reset();
  const std::string request = std::move(control_);
  uint64_t left = header.num_bytes - request.size();
  const std::shared_ptr<Service> service = own_.service.get();
  std::unique_ptr<Exchange> exchange;
  std::vector<iovec> parts;
  std::optional<ErrorReason> refusal;
  try {
    if (!service) throw Refused(ErrorReason("it serves no objects", FailureKind::kIncompatible));
    exchange = service->begin(request, left);
    if (std::exchange(left, 0) > 0) take_in(*exchange, limit);
    parts = exchange->response();
  } catch (const Refused& refused) {
    refusal = refused.reason();
  } catch (const Failure&) {  // of the connection
    throw;
  } catch (const std::exception& error) {
    refusal = reason_of(error);
  }
  if (refusal) {
    socket_.discard(left, limit);
    if (refusal->empty()) refusal->text = "no reason was given";
    return refuse(header, *refusal, limit);
  }
  uint64_t num_bytes = 0;
  for (const iovec& part : parts) num_bytes += part.iov_len;
  Ack ack{Status::kDone, 0, header.request_id, num_bytes};
  sign(socket_.frame_macs(), ack, {});
  parts.insert(parts.begin(), {&ack, sizeof(ack)});
  socket_.send_lent(parts.data(), parts.size(), 1, limit);
  socket_.settle(socket_.num_lent(), limit);
}

// A step at a time: the exchange looks at each while the next one arrives.
void Session::take_in(Exchange& exchange, const Limit& limit) {
  constexpr uint64_t kStepBytes = 256 << 10;
  for (iovec part : exchange.payload()) {
    while (part.iov_len > 0) {
      iovec step{part.iov_base, std::min<uint64_t>(part.iov_len, kStepBytes)};
      part.iov_len -= step.iov_len;
      if (part.iov_base) {
        part.iov_base = static_cast<char*>(part.iov_base) + step.iov_len;
        iovec receiving = step;
        socket_.receive(&receiving, 1, limit);
      } else {
        socket_.discard(step.iov_len, limit);
      }
      exchange.arrived(step);
    }
  }
}

std::vector<RegionRef> Session::check(const BatchHeader& header, Rights needed) const {
  if (header.request_id == refused_request_) {
    throw Refused("an earlier batch of the request was refused");
  }
  return own_.regions.check(Ranges::rows(table_), needed, "remote", header.first_range);
}

// An engine whose transports include rdma but not tcp listens only for control connections.
void Session::check_offered() const {
  if (!own_.is_tcp && !socket_.is_within_machine())
    throw Refused(ErrorReason("the peer has tcp disabled", FailureKind::kIncompatible));
}

// Memory that was found missing is tried before it is promised.
void Session::expect_readable(const std::vector<RegionRef>& regions) const {
  const auto is_doubted = [](const RegionRef& region) { return region->is_doubted->load(); };
  if (std::none_of(regions.begin(), regions.end(), is_doubted)) return;
  const GpuRanges gpus(regions);
  for (const Range& range : table_) {
    if (!gpus.empty() && gpus.device_of(range.address) >= 0) continue;
    const auto fault = try_to_read(reinterpret_cast<const void*>(range.address), range.num_bytes);
    if (!fault) continue;
    throw Refused(at_the_peer(Inaccessible(fault->describe()).reason()));
  }
}

std::vector<iovec>& Session::parts_of_table() {
  parts_.clear();
  for (const Range& range : table_) append_part(parts_, range.address, range.num_bytes);
  return parts_;
}

void Session::acknowledge(const BatchHeader& header, const Limit& limit) {
  Ack ack{Status::kDone, 0, header.request_id, header.num_bytes};
  sign(socket_.frame_macs(), ack, {});
  socket_.send(&ack, sizeof(ack), limit);
}

void Session::respond(const BatchHeader& header, const void* data, uint64_t num_bytes,
                      const Limit& limit) {
  Ack ack{Status::kDone, 0, header.request_id, num_bytes};
  iovec parts[] = {{&ack, sizeof(ack)}, {const_cast<void*>(data), num_bytes}};
  sign(socket_.frame_macs(), ack, {parts[1]});
  socket_.send(parts, num_bytes > 0 ? 2 : 1, limit);
}

void Session::refuse(const BatchHeader& header, const ErrorReason& why, const Limit& limit) {
  const bool is_of_request = header.op <= Op::kNotify;  // the later ops are queries
  if (is_of_request) refused_request_ = header.request_id;
  const std::string text = why.text.substr(0, kMaxRefusalBytes);
  Ack ack{Status::kRefused, static_cast<uint32_t>(text.size()), header.request_id, 0};
  ack.refusal_kind = static_cast<uint64_t>(why.kind);
  iovec parts[] = {{&ack, sizeof(ack)}, {const_cast<char*>(text.data()), text.size()}};
  sign(socket_.frame_macs(), ack, {parts[1]});
  socket_.send(parts, 2, limit);
}

}  // namespace mk::transfer
