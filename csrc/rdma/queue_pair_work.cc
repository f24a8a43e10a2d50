// The data path of a queue pair: turns transfers into work requests and work completions into
// results.
#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <optional>

#include "rdma/queue_pair.h"

namespace mk::rdma {
namespace {

// A wr_id: whether it is a receive, the number of its connection, and the sequence number.
constexpr uint64_t kReceive = uint64_t{1} << 63;
constexpr int kGenerationShift = 48;
constexpr uint64_t kSeqMask = (uint64_t{1} << kGenerationShift) - 1;
// Work requests posted by one call. Soft-RoCE loses some reads of a burst and has to request them
// again, so reads are posted one by one. What that costs on hardware was not measured.
constexpr size_t kChain = 32;
constexpr size_t kReadChain = 1;
constexpr size_t kKeptParts = 4096;  // of a transfer, for those to come

}  // namespace

uint64_t QueuePair::wr_id(uint64_t seq) const {
  return uint64_t{generation_} << kGenerationShift | (seq & kSeqMask);
}

// Without memory: an immediate carries no data.
int QueuePair::post_receive() {
  ibv_recv_wr receive{};
  receive.wr_id = kReceive | wr_id(0);
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(qp_, &receive, &bad);
}

Completion QueuePair::Batch::completion(uint32_t qp_num) const {
  Completion completion;
  completion.token = token;
  completion.qp_num = qp_num;
  completion.status = status;
  completion.vendor_error = vendor_error;
  completion.num_bytes = num_bytes_done;
  return completion;
}

QueuePair::Batches QueuePair::take_spare() {
  Batches taken;
  if (spare_.empty()) {
    taken.emplace_back();
  } else {
    taken.splice(taken.end(), spare_, spare_.begin());
  }
  return taken;
}

void QueuePair::submit(const Transfer& transfer) {
  const Use use(*this, transfer.reads ? "read" : "write");
  std::unique_lock lock(mutex_);
  Batches taken = take_spare();
  lock.unlock();
  Batch& batch = taken.front();
  std::optional<Use> region;
  if (transfer.region) {
    region.emplace(*transfer.region, transfer.reads ? "read" : "write");
    MK_CHECK(transfer.region->device() == queue_->device(), transfer.reads ? "read" : "write",
             ": region must be registered on ", queue_->device()->name(), ", got one on ",
             transfer.region->device()->name());
  }
  make_work(transfer, limits_, batch.work);
  region.reset();
  batch.region = transfer.region;
  batch.token = transfer.token;
  batch.immediate = transfer.immediate;
  std::vector<Completion> out;
  lock.lock();
  MK_CHECK(state_ == State::kConnected || state_ == State::kFailed,
           transfer.reads ? "read" : "write", ": ", what(), " must be connected, but is not");
  if (waiting_ == batches_.end()) waiting_ = taken.begin();
  batches_.splice(batches_.end(), taken);
  post_pending(&out);
  lock.unlock();
  queue_->push(std::move(out));
}

// Posts as much as there is room for. Appends what that completes: transfers of no bytes, and all
// that waits if the queue pair has failed.
void QueuePair::post_pending(std::vector<Completion>* out) {
  while (state_ == State::kConnected && waiting_ != batches_.end()) {
    Batch& batch = *waiting_;
    if (batch.is_posted()) {
      if (batch.work.requests.empty()) batch.first_seq = head_;  // done when all before it is done
      ++waiting_;
      continue;
    }
    const size_t room = options_.max_sends - (head_ - tail_);
    const size_t left = batch.work.requests.size() - batch.num_posted;
    const size_t count = std::min({room, left, batch.work.reads ? kReadChain : kChain});
    if (count == 0) break;
    const int error = post_chain(&batch, count);
    if (error == 0) continue;
    fail(&batch, IBV_WC_GENERAL_ERR, error);
    give_up(out);
  }
  retire(tail_, out);
  if (state_ == State::kFailed) fail_pending(out);
}

// Returns the errno of what could not be posted.
int QueuePair::post_chain(Batch* batch, size_t count) {
  std::array<ibv_send_wr, kChain> chain{};
  const size_t num_requests = batch->work.requests.size();
  // Signals often enough that a signalled request, which makes room, is always in flight.
  const uint64_t signal_every = std::max(options_.max_sends / 4, 1);
  if (batch->num_posted == 0) batch->first_seq = head_;
  for (size_t i = 0; i < count; ++i) {
    const size_t index = batch->num_posted + i;
    const WorkRequest& request = batch->work.requests[index];
    const bool is_last = index + 1 == num_requests;
    ibv_send_wr& wr = chain[i];
    wr.wr_id = wr_id(head_ + i);
    wr.next = i + 1 < count ? &chain[i + 1] : nullptr;
    wr.sg_list = batch->work.parts.data() + request.first_part;
    wr.num_sge = static_cast<int>(request.num_parts);
    wr.opcode = batch->work.reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
    if (is_last && batch->immediate) {
      wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      wr.imm_data = htonl(*batch->immediate);
    }
    const bool signaled = is_last || (head_ + i + 1) % signal_every == 0;
    wr.send_flags = signaled ? IBV_SEND_SIGNALED : 0;
    wr.wr.rdma.remote_addr = request.remote;
    wr.wr.rdma.rkey = request.rkey;
  }
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(qp_, chain.data(), &bad);
  const size_t posted = error == 0 ? count : bad ? static_cast<size_t>(bad - chain.data()) : 0;
  head_ += posted;
  batch->num_posted += posted;
  return error;
}

void QueuePair::complete(const ibv_wc& wc, std::vector<Completion>* out) {
  const std::lock_guard lock(mutex_);
  if ((wc.wr_id & ~kSeqMask & ~kReceive) != (wr_id(0) & ~kReceive)) return;  // old connection
  if (wc.wr_id & kReceive) {
    take_immediate(wc, out);
    return;
  }
  const uint64_t seq = wc.wr_id & kSeqMask;
  if (wc.status != IBV_WC_SUCCESS) {
    const auto failed = std::find_if(batches_.begin(), batches_.end(), [&](const Batch& batch) {
      return seq >= batch.first_seq && seq < batch.end_seq();
    });
    tail_ = std::max(tail_, seq);  // everything before it is delivered
    if (failed != batches_.end()) fail(&*failed, wc.status, wc.vendor_err);
    // The NIC flushes what is posted, each with a work completion; empty transfers have none.
    for (auto later = failed; later != batches_.end(); ++later) {
      if (later->work.requests.empty()) fail(&*later, IBV_WC_WR_FLUSH_ERR, 0);
    }
    state_ = State::kFailed;
  }
  tail_ = std::max(tail_, seq + 1);
  post_pending(out);
}

void QueuePair::take_immediate(const ibv_wc& wc, std::vector<Completion>* out) {
  if (wc.status != IBV_WC_SUCCESS) {
    if (batches_.empty()) give_up(out);  // otherwise the batches report it
    return;
  }
  Completion completion;
  completion.kind = Completion::Kind::kImmediate;
  completion.qp_num = number_;
  completion.immediate = ntohl(wc.imm_data);
  completion.num_bytes = wc.byte_len;
  out->push_back(completion);
  if (state_ == State::kConnected && post_receive() != 0) give_up(out);
}

// For a transfer, only the first error counts, and what is known to be delivered at that time.
void QueuePair::fail(Batch* batch, int status, uint32_t vendor_error) {
  if (batch->status != IBV_WC_SUCCESS) return;
  batch->status = status;
  batch->vendor_error = vendor_error;
  for (size_t i = 0; i < batch->num_posted && batch->first_seq + i < tail_; ++i) {
    batch->num_bytes_done += batch->work.requests[i].num_bytes;
  }
}

// Ends everything if this process detected the failure: unsignalled work requests that succeed
// complete silently, so there is nothing to wait for. A reset makes the NIC release them.
void QueuePair::give_up(std::vector<Completion>* out) {
  state_ = State::kFailed;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  Verbs::get().p_ibv_modify_qp(qp_, &attr, IBV_QP_STATE);
  end_batches(IBV_WC_WR_FLUSH_ERR, out);
}

// Its completion, and no longer any memory of it.
void QueuePair::end(Batches::iterator batch, std::vector<Completion>* out) {
  out->push_back(batch->completion(number_));
  if (waiting_ == batch) ++waiting_;
  Batch blank;
  if (batch->work.parts.capacity() <= kKeptParts) blank.work = std::move(batch->work);
  *batch = std::move(blank);
  spare_.splice(spare_.begin(), batches_, batch);
}

// Ends all transfers, giving that status to those without an error.
void QueuePair::end_batches(int status, std::vector<Completion>* out) {
  while (!batches_.empty()) {
    fail(&batches_.front(), status, 0);
    end(batches_.begin(), out);
  }
  tail_ = head_;
  generation_ = next_generation();
}

// Completes the transfers whose work requests are all before `end_seq`.
void QueuePair::retire(uint64_t end_seq, std::vector<Completion>* out) {
  while (waiting_ != batches_.begin() && batches_.front().end_seq() <= end_seq) {
    Batch& batch = batches_.front();
    if (batch.status == IBV_WC_SUCCESS) {
      for (const WorkRequest& request : batch.work.requests) {
        batch.num_bytes_done += request.num_bytes;
      }
    }
    end(batches_.begin(), out);
  }
}

// Ends what will not be posted any more. What is posted, even in part, ends when it is flushed.
void QueuePair::fail_pending(std::vector<Completion>* out) {
  while (waiting_ != batches_.end() && batches_.back().num_posted == 0) {
    Batch& batch = batches_.back();
    if (batch.status == IBV_WC_SUCCESS) batch.status = IBV_WC_WR_FLUSH_ERR;
    end(std::prev(batches_.end()), out);
  }
  waiting_ = batches_.end();
  retire(tail_, out);
}

}  // namespace mk::rdma
