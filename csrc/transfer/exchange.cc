#include "transfer/exchange.h"

#include <algorithm>

#include "transfer/batch.h"
#include "transfer/error.h"

namespace mk::transfer {
namespace {

// Batches under way at once: one is received while the next is sent.
constexpr size_t kWindow = 2;

}  // namespace

void Exchange::run() {
  if (!fits_one_batch(request_)) check();
  if (request_.direction == Direction::kWrite) {
    write();
  } else {
    read();
  }
  if (request_.notify) notify();
  settle();
}

void Exchange::check() {
  const Op op = request_.direction == Direction::kWrite ? Op::kCheckWrite : Op::kCheckRead;
  const std::vector<Range>& ranges = request_.remote;
  for (size_t first = 0; first < ranges.size(); first += kMaxBatchRanges) {
    const size_t count = std::min<size_t>(ranges.size() - first, kMaxBatchRanges);
    post(op, first, &ranges[first], count, {}, 0);
  }
  settle();
}

void Exchange::write() {
  BatchCursor cursor(request_);
  for (Batch batch; refusal_.empty() && cursor.next(batch);) {
    post(Op::kWrite, batch.first_range, batch.remote.data(), batch.remote.size(), batch.local,
         batch.num_bytes);
  }
}

// One batch at a time: sending the next table while the peer sends payload could, with small
// socket buffers, leave both sides waiting for the other to read.
void Exchange::read() {
  BatchCursor cursor(request_);
  for (Batch batch; cursor.next(batch);) {
    post(Op::kRead, batch.first_range, batch.remote.data(), batch.remote.size(), {},
         batch.num_bytes);
    settle();
    socket_.receive(batch.local.data(), batch.local.size(), limit_);
    num_bytes_done_ += batch.num_bytes;
  }
}

void Exchange::notify() {
  const std::string& bytes = *request_.notify;
  std::vector<iovec> payload;
  if (!bytes.empty()) payload.push_back({const_cast<char*>(bytes.data()), bytes.size()});
  post(Op::kNotify, 0, nullptr, 0, payload, bytes.size());
}

void Exchange::post(Op op, uint64_t first_range, const Range* ranges, size_t num_ranges,
                    const std::vector<iovec>& payload, uint64_t num_bytes) {
  while (posted_.size() >= kWindow) receive_ack();
  if (!refusal_.empty()) return;  // the peer refuses the rest of the request, too
  BatchHeader header{op, static_cast<uint32_t>(num_ranges), request_id_, first_range, num_bytes};
  parts_.clear();
  parts_.push_back({&header, sizeof(header)});
  if (num_ranges > 0) {
    parts_.push_back({const_cast<Range*>(ranges), num_ranges * sizeof(Range)});
  }
  parts_.insert(parts_.end(), payload.begin(), payload.end());
  socket_.send(parts_.data(), parts_.size(), limit_);
  posted_.push_back({op, num_bytes});
}

void Exchange::settle() {
  while (!posted_.empty()) receive_ack();
  if (!refusal_.empty()) throw Refused(refusal_);
}

void Exchange::receive_ack() {
  const Posted posted = posted_.front();
  Ack ack;
  socket_.receive(&ack, sizeof(ack), limit_);
  check_ack(ack, request_id_, posted.num_bytes);
  posted_.pop_front();
  if (ack.status == Status::kRefused) {
    std::string refusal(ack.refusal_bytes, '\0');
    socket_.receive(refusal.data(), refusal.size(), limit_);
    if (refusal_.empty()) refusal_ = printable(std::move(refusal));
  } else if (posted.op == Op::kWrite) {
    num_bytes_done_ += posted.num_bytes;
  }
}

}  // namespace mk::transfer
