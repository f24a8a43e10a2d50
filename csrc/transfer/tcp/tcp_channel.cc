#include "transfer/tcp/tcp_channel.h"

#include <poll.h>

#include <algorithm>
#include <string>
#include <utility>

#include "transfer/base/error.h"
#include "transfer/channel/checksum.h"
#include "transfer/net/handshake.h"

namespace mk::transfer {
namespace {

constexpr char kLocal[] = "local ";  // before "memory is not accessible"
constexpr int kMaxTries = 30;        // to find a place at a peer that strangers crowd
constexpr int kPauseMs = 5;          // after the first; they get longer
constexpr int kMaxPauseMs = 25;
constexpr size_t kMaxFrames = 2;                 // in flight at once
constexpr uint64_t kMinRoomBytes = 20ull << 10;  // an idle socket has it without being asked

}  // namespace

void TcpChannel::connect(const Limit& limit) {
  disconnect();
  for (int num_tries = 1; !try_connect(limit, num_tries == kMaxTries); ++num_tries) {
    pollfd interrupt{limit.interrupt.fd(), POLLIN, 0};
    poll(&interrupt, 1, std::min(kPauseMs * num_tries, kMaxPauseMs));
    limit.check();
  }
}

// False if the peer has not answered, unless it is the last try: then that is a Failure.
bool TcpChannel::try_connect(const Limit& limit, bool is_last) try {
  Socket socket = Socket::connect(addresses_, limit);
  ++link_.epoch;  // the peer ends the previous connection if it still serves it
  const Greeting peer = introduce(socket, *own_, link_, to_, limit);
  identity_->check(peer.hello.instance, peer.name);
  identity_->lost()->recover(link_);
  socket_ = std::move(socket);
  return true;
} catch (const NotAnswered&) {
  if (is_last) throw;
  return false;
}

void TcpChannel::disconnect() noexcept {
  if (std::exchange(is_writing_, false)) identity_->lost()->add(link_);
  socket_.close();
  frames_.clear();
  outcomes_.clear();
  current_ = {};
}

void TcpChannel::close() noexcept {
  disconnect();
  staging_.close();
}

void TcpChannel::post(const Work& work, const Limit& limit) {
  if (is_reading()) drain(limit);
  fence_lost(limit);
  const uint64_t num_sent = num_sent_;
  switch (work.kind) {
    case Work::Kind::kCheck:
      check(work, limit);
      break;
    case Work::Kind::kMove:
      move_and_notify(work, limit);
      break;
    case Work::Kind::kNotify:
      notify(work, limit);
      break;
  }
  if (num_sent_ == num_sent) drain(limit);  // none of the frames in flight is this work's
  if (frames_.empty()) {                    // all of it is acknowledged
    outcomes_.push_back(std::exchange(current_, {}));
  } else {
    frames_.back().last_of_work = true;
  }
}

void TcpChannel::move_and_notify(const Work& work, const Limit& limit) try {
  move(work, limit);
  if (work.request->verify || (work.with_notify && is_reading())) drain(limit);
  compare(work, limit);
  // With frames in flight a refusal may be an earlier work's; the peer keeps the notification of a
  // request that it refuses to itself.
  if (work.with_notify && (current_.refusal.empty() || !frames_.empty())) notify(work, limit);
} catch (const Inaccessible& fault) {  // of local memory
  // Half of a frame has left, or the next one would be numbered as if this one had.
  if (fault.num_bytes_moved > 0 || socket_.frame_macs()) throw;
  drain(limit);
  current_.refusal = fault.of(kLocal);
}

Outcome TcpChannel::finish(const Limit& limit) {
  while (outcomes_.empty()) receive_ack(limit);
  Outcome outcome = std::move(outcomes_.front());
  outcomes_.pop_front();
  return outcome;
}

// A subclass does it differently, and TLS does not tell how much has arrived.
CallerDriven* TcpChannel::caller_driven() {
  return transport() == Transport::kTcp && !own_->credentials.tls ? this : nullptr;
}

// Not if the response comes in steps; GPU work is waited for elsewhere.
bool TcpChannel::may_drive(const Request& request) const {
  const bool in_turns = request.verify || (!request.writes() && request.notify);
  return !in_turns && !request.after && GpuRanges(request.regions).empty();
}

// All that was sent before has been received.
bool TcpChannel::can_drive(const Request& request) const {
  if (must_fence()) return false;
  // What is lent disturbs the thread that has sent it (zero_copy.h), which is not ours. Of adjacent
  // ranges it may be one part.
  if (request.writes() && socket_.lends(request.num_bytes, 1)) return false;
  uint64_t num_bytes = request.num_ranges() * sizeof(Range);
  if (request.writes()) num_bytes += request.num_bytes;
  if (request.notify) num_bytes += request.notify->size();
  return num_bytes <= kMinRoomBytes || num_bytes <= socket_.num_bytes_room();
}

bool TcpChannel::is_ready() const { return socket_.num_bytes_here() >= num_bytes_due(); }

bool TcpChannel::wait_for_all() {
  if (socket_.num_bytes_here() <= sizeof(Ack) + kMaxRefusalBytes) return false;
  socket_.wake_from(num_bytes_due());
  return true;
}

uint64_t TcpChannel::num_bytes_due() const {
  uint64_t due = 0;
  for (const Frame& frame : frames_) {
    due += sizeof(Ack) + (frame.op == Op::kRead ? frame.num_bytes : 0);
  }
  return due;
}

Path TcpChannel::path_to(const Range&, int) const {
  const char* const guarded =
      socket_.is_tls() ? "by a TCP connection, within TLS" : "by a TCP connection";
  return {"connection", "", concat("the bytes go ", guarded)};
}

std::vector<RegionTable::Listed> TcpChannel::list_regions(const Limit& limit) {
  std::vector<RegionTable::Listed> listed;
  for (const ListEntry& entry : query<ListEntry>(Op::kList, kMaxListed, limit)) {
    check_listed(entry);
    listed.push_back({{entry.address, entry.num_bytes}, entry.rights, device_at(entry.location)});
  }
  return listed;
}

uint64_t TcpChannel::call(const std::string& request, std::vector<iovec> payload,
                          const Limit& limit) {
  uint64_t num_bytes = request.size();
  for (const iovec& part : payload) num_bytes += part.iov_len;
  BatchHeader header{Op::kCall, 0, kQueryId, request.size(), num_bytes};
  sign(socket_.frame_macs(), header, {{const_cast<char*>(request.data()), request.size()}});
  payload.insert(payload.begin(),
                 {{&header, sizeof(header)}, {const_cast<char*>(request.data()), request.size()}});
  socket_.send_lent(payload.data(), payload.size(), 2, limit);
  const Ack ack = receive_response_ack(1, kMaxRpcResponseBytes, limit);
  verify(socket_.frame_macs(), ack, {});
  return ack.num_bytes;
}

Ack TcpChannel::receive_response_ack(uint64_t entry_bytes, uint64_t max_bytes, const Limit& limit) {
  Ack ack;
  socket_.receive(&ack, sizeof(ack), limit);
  check_response(ack, kQueryId, entry_bytes, max_bytes);
  socket_.settle(socket_.num_lent(), limit);
  if (ack.status == Status::kRefused) throw Refused(receive_refusal(ack, limit));
  return ack;
}

ErrorReason TcpChannel::receive_refusal(const Ack& ack, const Limit& limit) {
  std::string refusal(ack.refusal_bytes, '\0');
  socket_.receive(refusal.data(), refusal.size(), limit);
  verify(socket_.frame_macs(), ack, {{refusal.data(), refusal.size()}});
  return {printable(std::move(refusal)), kind_of_peer(static_cast<FailureKind>(ack.refusal_kind))};
}

void TcpChannel::drain(const Limit& limit) {
  while (!frames_.empty()) receive_ack(limit);
}

// Lanes that get here at the same time each ask: none goes on before its own answer.
void TcpChannel::fence_lost(const Limit& limit) {
  if (!must_fence()) return;
  drain(limit);
  std::vector<Link> lost = identity_->lost()->all();
  BatchHeader header{Op::kFence, 0, 0, 0, lost.size() * sizeof(Link)};
  iovec parts[] = {{&header, sizeof(header)}, {lost.data(), header.num_bytes}};
  sign(socket_.frame_macs(), header, {parts[1]});
  socket_.send(parts, 2, limit);
  frames_.push_back({Op::kFence, 0, header.num_bytes, false});
  drain(limit);
  if (!current_.refusal.empty()) throw LinkDown(current_.refusal);
  identity_->lost()->forget(lost);
}

void TcpChannel::check(const Work& work, const Limit& limit) {
  const Op op = work.request->writes() ? Op::kCheckWrite : Op::kCheckRead;
  const Ranges ranges = work.request->ranges(work.request->remote);
  for (size_t first = 0; first < ranges.count; first += kMaxBatchRanges) {
    batch_.remote.clear();
    const size_t end = std::min<size_t>(ranges.count, first + kMaxBatchRanges);
    for (size_t i = first; i < end; ++i) batch_.remote.push_back(ranges[i]);
    send(work, op, first, batch_.remote.data(), batch_.remote.size(), {}, 0, limit);
  }
}

void TcpChannel::move(const Work& work, const Limit& limit) {
  const Piece& piece = work.piece;
  fill(*work.request, piece, batch_);
  const auto send_table = [&](Op op, const std::vector<iovec>& payload) {
    send(work, op, piece.first_range, batch_.remote.data(), batch_.remote.size(), payload,
         piece.num_bytes, limit);
  };
  if (work.request->writes()) return send_table(Op::kWrite, batch_.local);
  drain(limit);
  reading_gpus_ = GpuRanges(work.request->regions);
  send_table(Op::kRead, {});
}

void TcpChannel::compare(const Work& work, const Limit& limit) {
  const Request& request = *work.request;
  if (!request.verify || work.piece.num_ranges == 0 || !current_.refusal.empty()) return;
  fill(request, work.piece, batch_);
  Checksummer(GpuRanges(request.regions), staging_, limit).sum(request, work.piece, checksums_);
  const size_t num_ranges = batch_.remote.size(), num_bytes = num_ranges * sizeof(uint64_t);
  send(work, request.writes() ? Op::kVerifyWrite : Op::kVerifyRead, work.piece.first_range,
       batch_.remote.data(), num_ranges, {{checksums_.data(), num_bytes}}, num_bytes, limit);
  drain(limit);
  if (!current_.refusal.empty() || num_equal_ == num_ranges) return;
  if (num_equal_ > num_ranges) throw Failure(protocol_error("more ranges agree than were asked"));
  current_.refusal = checksum_reason(request, work.piece, num_equal_);
}

void TcpChannel::notify(const Work& work, const Limit& limit) {
  const std::string& bytes = *work.request->notify;
  std::vector<iovec> payload;
  if (!bytes.empty()) payload.push_back({const_cast<char*>(bytes.data()), bytes.size()});
  send(work, Op::kNotify, 0, nullptr, 0, payload, bytes.size(), limit);
}

void TcpChannel::send(const Work& work, Op op, uint64_t first_range, const Range* ranges,
                      size_t num_ranges, const std::vector<iovec>& payload, uint64_t num_bytes,
                      const Limit& limit) {
  while (frames_.size() >= kMaxFrames) receive_ack(limit);
  BatchHeader header{op, static_cast<uint32_t>(num_ranges), work.request_id, first_range,
                     num_bytes};
  parts_.clear();
  parts_.push_back({&header, sizeof(header)});
  if (num_ranges > 0) {
    parts_.push_back({const_cast<Range*>(ranges), num_ranges * sizeof(Range)});
  }
  Range zeros[kMaxZeroRanges]{};
  if (const uint32_t count = num_zero_ranges(header)) {
    parts_.push_back({zeros, count * sizeof(Range)});
  }
  const bool is_control = op != Op::kWrite && !payload.empty();  // then it is one part
  const iovec table{const_cast<Range*>(ranges), num_ranges * sizeof(Range)};
  sign(socket_.frame_macs(), header, {table, is_control ? payload.front() : iovec{}});
  const size_t first_of_payload = parts_.size();
  parts_.insert(parts_.end(), payload.begin(), payload.end());
  is_writing_ |= op == Op::kWrite;
  if (op == Op::kNotify) *work.notify_begun = true;
  const GpuRanges gpus = op == Op::kWrite ? GpuRanges(work.request->regions) : GpuRanges();
  const bool may_lend = op == Op::kWrite && gpus.empty();  // staging memory is filled again
  staging_.gather(parts_, gpus, limit, [&](iovec* host, size_t n) {
    may_lend ? socket_.send_lent(host, n, first_of_payload, limit) : socket_.send(host, n, limit);
  });
  frames_.push_back({op, work.request_id, verifies(op) ? sizeof(NumEqual) : num_bytes, false,
                     socket_.num_lent()});
  ++num_sent_;
}

void TcpChannel::receive_ack(const Limit& limit) {
  const Frame frame = frames_.front();
  Ack ack;
  socket_.receive(&ack, sizeof(ack), limit);
  check_ack(ack, frame.request_id, frame.num_bytes);
  socket_.settle(frame.num_lent, limit);
  frames_.pop_front();
  if (ack.status == Status::kDone && verifies(frame.op)) {
    socket_.receive(&num_equal_, sizeof(num_equal_), limit);
    verify(socket_.frame_macs(), ack, {{&num_equal_, sizeof(num_equal_)}});
  } else if (ack.status == Status::kDone) {
    verify(socket_.frame_macs(), ack, {});
  }
  if (ack.status == Status::kRefused) {
    ErrorReason refusal = receive_refusal(ack, limit);
    if (current_.refusal.empty()) current_.refusal = std::move(refusal);
  } else if (frame.op == Op::kWrite) {
    current_.num_bytes += frame.num_bytes;
  } else if (frame.op == Op::kRead) {
    ErrorReason failure =
        staging_.scatter(batch_.local, reading_gpus_, limit,
                         [&](iovec* parts, size_t n) { socket_.receive(parts, n, limit); });
    if (failure.empty()) current_.num_bytes += frame.num_bytes;
    if (failure.kind == FailureKind::kInaccessible) failure.text.insert(0, kLocal);
    if (current_.refusal.empty()) current_.refusal = std::move(failure);
  }
  if (frames_.empty()) is_writing_ = false;
  if (frame.last_of_work) outcomes_.push_back(std::exchange(current_, {}));
}

}  // namespace mk::transfer
